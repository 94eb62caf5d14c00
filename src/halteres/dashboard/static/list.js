// The list of runs. Owns: one row for each run, kept while its figures change. Never: asks for what has not changed.

import { get } from "./api.js";
import { badge, copyable, fill, h, offerOptions, say } from "./dom.js";
import { ago, duration, figure, moment, setClock, share } from "./format.js";
import { latest } from "./latest.js";
import { spark } from "./spark.js";

const AGES_MS = 10_000;
const GAINED = { rl: "reward", reward: "accuracy" }; // what the curve of a run is of; of a run on a file its loss
const MOST_IDS = 200; // in one address
const [FEWEST, MOST] = [2, 8]; // runs of a comparison

const ticked = new Set(); // ids of runs to be compared; kept while other views are shown

export function listView() {
  const rows = new Map(); // run id -> row
  let pending = new Set();
  let everything = true;

  const said = h("p", { class: "quiet", role: "status" }, "Reading the runs …");
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter by name, environment, model, state", on: { input: sift } });
  const tag = h("select", { "aria-label": "Only runs with the tag", hidden: true, on: { change: sift } });
  const list = h("div", { class: "runs" });
  const chosen = h("div", { class: "bar chosen", role: "status", hidden: true });
  const element = h("section", null, h("div", { class: "bar" }, h("h1", null, "Runs"), h("a", { class: "button", href: "#/new/" }, "New run"), tag, filter), said, chosen, list);

  const asking = latest(async () => {
    const [ids, all] = [pending, everything];
    [pending, everything] = [new Set(), false];
    try {
      const answer = await get("/api/runs", all ? {} : { ids: [...ids].join(",") });
      setClock(answer.now);
      show(answer.runs, all ? null : ids);
    } catch (error) {
      everything = true; // once the server is back
      say(said, error.message);
    }
  });

  function show(runs, asked) {
    const there = new Set(runs.map((run) => run.run_id));
    for (const id of asked ?? [...rows.keys()]) if (!there.has(id)) forget(id);
    for (const run of runs) {
      if (!rows.has(run.run_id)) rows.set(run.run_id, row(tick));
      rows.get(run.run_id).show(run);
    }
    order();
    offerTags();
    sift();
    choose();
  }

  function tick(id, yes) {
    if (yes) ticked.add(id);
    else ticked.delete(id);
    choose();
  }

  // What can be done with the runs that are ticked.
  function choose() {
    const ids = [...ticked].filter((id) => rows.has(id));
    for (const [id, one] of rows) one.tick(ticked.has(id), ids.length >= MOST);
    chosen.hidden = ids.length === 0;
    const clear = h("button", { type: "button", on: { click: () => { ticked.clear(); choose(); } } }, "Clear");
    const enough = ids.length >= FEWEST;
    const compare = enough ? h("a", { class: "button", href: `#/compare/${ids.map(encodeURIComponent).join(",")}` }, `Compare ${ids.length} runs`) : h("span", { class: "quiet" }, "Tick another run to compare with.");
    fill(chosen, compare, clear, h("span", { class: "quiet" }, "As one file:"), copyable(`halteres runs report ${ids.join(" ")} --out report.html`));
  }

  function offerTags() {
    offerOptions(tag, "all tags", [...rows.values()].flatMap(({ run }) => run.tags).sort());
  }

  function forget(id) {
    ticked.delete(id);
    rows.get(id)?.element.remove();
    rows.delete(id);
  }

  // Newest first; a row that lies where it belongs is not moved, so that it keeps the focus.
  function order() {
    const sorted = [...rows.values()].sort((a, b) => b.run.created_at - a.run.created_at);
    sorted.forEach((one, at) => {
      if (list.children[at] !== one.element) list.insertBefore(one.element, list.children[at] ?? null);
    });
  }

  function sift() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { run, element: line } of rows.values()) {
      const text = `${run.run_id} ${run.name} ${run.environment} ${run.model} ${run.status} ${run.tags.join(" ")}`.toLowerCase();
      line.hidden = !words.every((word) => text.includes(word)) || (tag.value !== "" && !run.tags.includes(tag.value));
      shown += line.hidden ? 0 : 1;
    }
    filter.hidden = rows.size < 2;
    if (rows.size === 0) fill(said, "No runs yet. Start one: ", copyable("halteres quickstart"));
    else if (shown === 0) say(said, "No run fits the filter.");
    else say(said, summary());
  }

  function summary() {
    const going = [...rows.values()].filter(({ run }) => run.ended_at === null).length;
    return `${rows.size} ${rows.size === 1 ? "run" : "runs"}${going ? `, ${going} going on` : ""}`;
  }

  const ages = setInterval(() => rows.forEach((one) => one.age()), AGES_MS);
  asking.run();
  return {
    element,
    changed(ids) {
      if (ids === null || ids.size > MOST_IDS) everything = true;
      else ids.forEach((id) => pending.add(id));
      asking.run();
    },
    close() {
      asking.close();
      clearInterval(ages);
    },
  };
}

// One run: made once, then changed in place.
function row(ticking) {
  const cell = (name) => h("span", { class: name });
  const [state, name, about, steps, curve, reward, held, age, alerts, tags] = [
    "state", "name", "about quiet", "steps", "curve", "figure", "figure", "age quiet", "alerts", "tags",
  ].map(cell);
  const box = h("input", { type: "checkbox", on: { change: () => ticking(made.run.run_id, box.checked) } });
  const progress = h("progress", { max: 1, value: 0, "aria-hidden": "true" });
  const labelled = (label, value) => h("span", { class: "labelled" }, h("span", { class: "label" }, label), value);
  const gained = h("span", { class: "label" });
  const link = h(
    "a", { class: "run" },
    state, h("span", { class: "who" }, name, about, tags, alerts), h("span", { class: "progress" }, progress, steps), curve,
    h("span", { class: "labelled" }, gained, reward), labelled("held out", held), age,
  );
  const made = {
    element: h("div", { class: "row" }, h("label", { class: "tick" }, box), link),
    run: null,
    tick(yes, full) {
      box.checked = yes;
      box.disabled = full && !yes;
    },
    age() {
      const { created_at, ended_at } = made.run;
      say(age, ended_at ? `${ago(created_at)}, took ${duration(ended_at - created_at)}` : ago(created_at));
    },
    show(run) {
      made.run = run;
      const isScript = run.kind === "script"; // a training run of the Tinker SDK, which knows of no end and is not compared
      link.href = `#/${isScript ? "training" : "runs"}/${encodeURIComponent(run.run_id)}`;
      box.hidden = progress.hidden = isScript;
      fill(state, badge(run.status, run.phase));
      say(name, run.name);
      const id = run.name.includes(run.run_id) ? null : run.run_id; // names need not differ
      say(about, [run.environment, run.model, id].filter(Boolean).join(" · "));
      box.setAttribute("aria-label", `Compare ${run.name}`);
      fill(tags, run.tags.map((one) => h("span", { class: "tag" }, one)));
      say(alerts, run.error ?? (run.alerts.length ? `⚠ ${run.alerts.join(", ")}` : ""));
      alerts.classList.toggle("failed", run.status === "failed");
      progress.max = Math.max(1, run.total_steps);
      progress.value = run.step ?? 0;
      say(steps, isScript ? `step ${run.step ?? "–"}` : `${run.step} / ${run.total_steps}`);
      fill(curve, spark(run.curve));
      say(gained, GAINED[run.kind] ?? "loss");
      say(reward, figure(run.reward));
      say(held, GAINED[run.kind] ? share(run.evaluation) : figure(run.evaluation));
      age.title = moment(run.created_at);
      made.age();
    },
  };
  return made;
}
