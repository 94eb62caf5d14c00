// Runs as a file of their own. Owns: which parts of their pages it has. Never: asks for anything: all answers come along.

import { answerFrom, get, runPath } from "./api.js";
import { comparison } from "./compare.js";
import { curves } from "./curves.js";
import { h } from "./dom.js";
import { moment, setClock } from "./format.js";
import { listOf } from "./groups_file.js";
import { heading } from "./heading.js";
import { results } from "./results.js";
import { settings } from "./settings.js";
import { troubles } from "./troubles.js";
import { usage } from "./usage.js";

// data: see dashboard/report_file.py
export function view({ runs, answers, groups, sources, written, version }) {
  answerFrom(answers);
  setClock(written);
  const title = runs.length > 1 ? `${runs.length} runs` : "A run";
  const element = h("article", { class: "report" }, h("h1", null, title), h("p", { class: "quiet" }, `as of ${moment(written)} · Halteres ${version}`));
  if (runs.length > 1) {
    const compared = comparison(runs);
    element.append(compared.element);
    compared.ask();
  }
  for (const id of runs) element.append(shown(id, groups[id], sources[id]));
  return element;
}

// One run: what its page has, without what can be done with it.
function shown(id, sampled, source) {
  const parts = { heading: heading(id, { acts: false }), troubles: troubles(), curves: curves(), results: results(id), usage: usage(id), settings: settings(id) };
  const element = h(
    "article", { id: `/runs/${id}` }, parts.heading.element, parts.troubles.element, parts.curves.element, parts.results.element,
    rollouts(sampled), parts.usage.element, parts.settings.element, madeOf(source),
  );
  draw();
  return element;

  async function draw() {
    const [run, metrics] = [await get(runPath(id)), await get(runPath(id, "metrics"))];
    for (const part of [parts.heading, parts.troubles, parts.usage, parts.settings]) part.show(run);
    const again = () => parts.curves.show(metrics, run);
    parts.curves.element.addEventListener("wanted", again);
    again();
    parts.heading.held(metrics.evaluations);
    parts.results.evaluated(metrics.evaluations.step.length, run);
  }
}

function rollouts(groups) {
  if (groups.length === 0) return null;
  return h("section", { class: "rollouts" }, h("h2", null, "Rollouts of the last step"), listOf(groups).element);
}

function madeOf({ environment, environment_sha256: file, is_as_run: asRun, model, model_sha256: weights }) {
  const hash = (known) => (known ? h("code", null, known) : "not there any more");
  return h(
    "section", null, h("h2", null, "What it was made of"),
    h(
      "dl", { class: "paths" },
      h("dt", null, `environment ${environment}`), h("dd", null, "SHA-256 ", hash(file), file && !asRun ? " (as it was when this file was written)" : ""),
      h("dt", null, `model ${model}`), h("dd", null, "SHA-256 ", hash(weights)),
    ),
  );
}
