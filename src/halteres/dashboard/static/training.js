// One training run that a script of the Tinker SDK made in a service of this user's. Owns: what its view has.
// Never: shows what a run of ours has trained, which has a page of its own.

import { get } from "./api.js";
import { curves } from "./curves.js";
import { badge, copyable, fill, h, say } from "./dom.js";
import { ago, figure, moment, setClock } from "./format.js";
import { fact } from "./heading.js";
import { latest } from "./latest.js";
import { drawMetrics } from "./run.js";

const PAUSE_MS = 2000; // of a service that samples there is news all the time

export function trainingView(id) {
  const path = `/api/training_runs/${encodeURIComponent(id)}`;
  const [said, head, drawn, saved] = [h("p", { class: "quiet", role: "status" }, "Reading the training run …"), h("header", { class: "head" }), curves(), h("section")];
  const element = h("article", null, h("p", { class: "back" }, h("a", { href: "#/" }, "← All runs")), said, head, drawn.element, saved);
  const draw = () => drawMetrics(drawn, path, { kind: "sft", marks: [], terminal: true });
  drawn.element.addEventListener("wanted", draw);

  const asking = latest(async () => {
    try {
      const run = await get(path);
      setClock(run.now);
      fill(head, ...heading(run));
      fill(saved, h("h2", null, "Checkpoints"), run.checkpoints.length ? checkpoints(run) : h("p", { class: "quiet" }, "None was saved."));
      await draw();
      say(said, "");
    } catch (error) {
      say(said, error.message);
    }
  }, PAUSE_MS);
  asking.run();
  return { element, changed: (ids) => (ids === null || ids.has("services")) && asking.run(), close: () => [asking.close(), drawn.close()] };
}

function heading(run) {
  const facts = { Step: run.step ?? "–", Rank: run.rank ?? "–", Owner: run.owner, Service: run.service ?? "ended", Created: ago(run.created_at), "Last request": ago(run.last_request_at) };
  return [
    h("div", { class: "bar" }, badge(run.status), h("h1", null, run.name)), h("p", { class: "quiet about" }, `${run.model} · ${run.id} · ${run.folder}`),
    h("div", { class: "tags" }, run.said.map((one) => h("span", { class: "tag" }, one))), h("dl", { class: "facts" }, Object.entries(facts).map(([label, value]) => value && fact(label, value))),
  ];
}

function checkpoints(run) {
  const about = (one) => [`step ${one.version}`, `${figure(one.size_bytes / 1e6)} MB`, moment(one.created_at), one.expires_at && `until ${moment(one.expires_at)}`].filter(Boolean);
  return h("dl", { class: "paths" }, run.checkpoints.map((one) => [h("dt", null, about(one).join(" · ")), h("dd", null, copyable(one.path))]));
}
