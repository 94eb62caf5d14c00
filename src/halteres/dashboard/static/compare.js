// Runs side by side. Owns: which curves of them share a chart, over which axis; the tool's own verdict, as it stands.
// Never: works out a figure or an interval by itself.

import { get, runPath } from "./api.js";
import { board, chartControls, curvePicker } from "./controls.js";
import { badge, fill, h, say } from "./dom.js";
import { duration, figure } from "./format.js";
import { latest } from "./latest.js";
import { AXES } from "./scale.js";
import { told } from "./settings.js";

const [ALL, REWARD, HELD_OUT] = ["rollouts/score", "reward/mean", "eval/percent_correct"];
const PAIRS = ["accuracy", "eval_accuracy"];
const TITLES = {
  [ALL]: "Score of all rollouts", [REWARD]: "Reward, mean of the batch", [HELD_OUT]: "Held-out tasks solved, 95 %",
  accuracy: "Pairs in the right order", eval_accuracy: "Held-out pairs",
};
const SHARES = [HELD_OUT, ...PAIRS];
const COLOURS = 8;

export function compareView(ids) {
  const said = h("p", { class: "quiet", role: "status" }, "Reading the runs …");
  const parts = comparison(ids);
  const element = h("article", null, h("p", { class: "back" }, h("a", { href: "#/" }, "← All runs")), h("h1", null, "Runs compared"), said, parts.element);

  const asking = latest(async () => {
    try {
      await parts.ask();
      say(said, "");
    } catch (error) {
      say(said, error.message); // what was told last stays
    }
  });
  asking.run();

  return {
    element,
    changed(changed) {
      if (changed === null || parts.ids().some((id) => changed.has(id))) asking.run();
    },
    close() {
      asking.close();
      parts.close();
    },
  };
}

// The verdict, the curves, the figures and the settings that differ; ask() reads them.
export function comparison(asked) {
  const verdict = h("section", { hidden: true });
  const over = h("select", { "aria-label": "Draw the curves over", on: { change: () => { controls.forget(); draw(); } } });
  const picker = curvePicker((name) => { added.push(name); ask(); });
  const controls = chartControls(draw, h("label", { class: "quiet" }, "Over ", over));
  const large = h("div", { class: "charts large" });
  const curves = h("section", { hidden: true }, controls.element, large, picker.element);
  const below = h("div");
  const element = h("div", { class: "comparison" }, verdict, curves, below);
  const charts = board(large, controls);
  const added = [];
  let runs = []; // { id, name, colour, metrics }
  fill(over, Object.entries(AXES).map(([name, { label }]) => h("option", { value: name }, label)));

  async function ask() {
    const answer = await get("/api/compare", { ids: asked.join(",") });
    const found = answer.runs.filter((run) => run.error === undefined);
    const names = [ALL, REWARD, ...PAIRS, ...added].join(",");
    const metrics = await Promise.all(found.map((run) => get(runPath(run.run_id, "metrics"), { names })));
    runs = found.map((run, at) => ({ id: run.run_id, name: nameOf(run), colour: at % COLOURS, metrics: metrics[at] }));
    const more = await valuesOf(answer.more_settings_that_differ ?? [], runs);
    verdict.hidden = false;
    fill(verdict, h("h2", null, "Which is better"), ...judged(answer, runs));
    fill(below, figures(answer, runs), settings({ ...answer.settings_that_differ, ...more }, runs));
    offer();
    draw();
  }

  function offer() {
    const names = [...new Set(runs.flatMap((run) => run.metrics.names))].sort();
    picker.offer(names.filter((name) => !(name in TITLES) && !added.includes(name) && !name.endsWith("_stderr")));
  }

  function draw() {
    const axis = over.value;
    const wanted = [...shownBy(runs), ...added].map((name) => [name, runs.flatMap((run) => series(run, name, axis))]);
    const drawn = wanted.filter(([, found]) => found.length > 0);
    controls.reach(0, Math.max(1, ...drawn.flatMap(([, found]) => found.map((one) => one.xs.at(-1) ?? 0))));
    curves.hidden = runs.length === 0;
    charts.show(drawn.map(([name, found]) => ({ title: TITLES[name] ?? name, share: SHARES.includes(name), height: 280, data: { series: found, axis: AXES[axis] } })));
  }

  return { element, ask, ids: () => runs.map((run) => run.id), close: charts.close };
}

function nameOf({ run_id, name }) {
  return name ? `${name} (${run_id})` : run_id;
}

// Where no run has dropped a group, the batch's mean says it all.
function shownBy(runs) {
  const same = runs.every(({ metrics: { columns } }) => columns[ALL] === undefined || String(columns[ALL]) === String(columns[REWARD]));
  return [...(same ? [] : [ALL]), REWARD, ...PAIRS, HELD_OUT];
}

// One curve of one run; none where it has no such metric, or nothing is known of it along this axis.
function series({ name: label, colour, metrics: { columns, axes, evaluations, each } }, name, axis) {
  const held = evaluations[name];
  const xs = axis === "step" ? (held ? evaluations : columns).step : (held ? evaluations.axes : axes)[axis];
  const values = held ?? columns[name];
  if (xs === undefined || !values?.some((value) => value !== null)) return [];
  const known = { label: each > 1 && !held ? `${label}, means of ${each} steps` : label, colour, xs, values, apart: true };
  return [held ? { ...known, kind: "points", margins: evaluations.margins[name] } : { ...known, kind: "line" }];
}

function judged({ best, notes = [], environment }, runs) {
  const said = environment ? [h("p", { class: "quiet" }, `all on ${environment}`)] : [];
  if (best) {
    const run = runs.find(({ id }) => id === best.run_id);
    const word = h("span", { class: `verdict ${best.certain ? "good" : ""}` }, best.certain ? "certain" : "not certain");
    said.unshift(h("p", null, h("b", null, run?.name ?? best.run_id), ` is ${best.certain ? "best" : "ahead"} by ${best.metric}: ${best.why} `, word));
  }
  return [...said, ...notes.map((note) => h("p", { class: "quiet" }, note))];
}

function figures({ runs: rows }, runs) {
  const facts = ["run_id", "name", "environment", "status", "step", "total_steps", "minutes", "error", "did_you_mean", "allowed"];
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !facts.includes(name));
  const line = (row) => {
    const run = runs.find(({ id }) => id === row.run_id);
    if (!run) return h("tr", null, h("th", { scope: "row" }, row.run_id), h("td", { colspan: names.length + 3 }, row.error));
    const who = [h("i", { class: `swatch points c${run.colour}` }), h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.name), row.environment ? ` ${row.environment}` : ""];
    const steps = row.total_steps ? `${row.step} / ${row.total_steps}` : String(row.step);
    return h("tr", null, h("th", { scope: "row" }, who), h("td", null, badge(row.status)), h("td", null, steps), h("td", null, duration(row.minutes * 60)), names.map((name) => h("td", null, put(row[name]))));
  };
  return table("Figures", ["run", "state", "step", "took", ...names], rows.map(line));
}

// A training metric is a number; an evaluation's its last value, with the best one and the gain where they differ.
function put(value) {
  if (value === null || value === undefined || typeof value !== "object") return figure(value);
  const { last, best, best_step: step, gain, ci95 } = value;
  const interval = ci95 ? ` (95 %: ${figure(ci95[0])} to ${figure(ci95[1])})` : "";
  return [
    h("b", null, figure(last)), best === undefined ? "" : `, best ${figure(best)} at step ${step}`,
    gain === undefined ? "" : h("div", { class: "quiet" }, `gain ${gain > 0 ? "+" : ""}${figure(gain)}${interval}`),
  ];
}

function settings(differing, runs) {
  const names = Object.keys(differing);
  if (names.length === 0) return h("section", null, h("h2", null, "Settings that differ"), h("p", { class: "quiet" }, "None."));
  const rows = names.map((name) => h("tr", null, h("th", { scope: "row" }, name), runs.map(({ id }) => h("td", null, told(differing[name]?.[id])))));
  return table("Settings that differ", ["setting", ...runs.map((run) => run.name)], rows);
}

// Values of settings that the answer names alone, for want of room.
async function valuesOf(names, runs) {
  if (names.length === 0) return {};
  const all = await Promise.all(runs.map(({ id }) => get(runPath(id, "settings"))));
  const of = (name) => all.map(({ settings: known }, at) => [runs[at].id, known.find((one) => one.name === name)?.value]);
  return Object.fromEntries(names.map((name) => [name, Object.fromEntries(of(name))]));
}

function table(title, columns, rows) {
  return h(
    "section", null, h("h2", null, title),
    h("div", { class: "wide", tabindex: 0 }, h("table", null, h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col" }, name)))), h("tbody", null, rows))),
  );
}
