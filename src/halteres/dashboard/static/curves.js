// Which charts a run has. Owns: the metrics of each, which are told together. Never: draws (`chart.js`).

import { chart } from "./chart.js";
import { fill, h } from "./dom.js";

const HELD_OUT = "eval/percent_correct";
const GREEDY = "eval/percent_correct_greedy";
const PAIRS = ["accuracy", "eval_accuracy"]; // of a run that trains a reward model: of each batch, held out

// title, metrics over the steps, metrics of evaluations; a chart without any value is not shown
const SMALL = [
  ["Loss per token", ["train/loss_per_token"], []],
  ["Loss", ["loss", "eval_loss"], []],
  ["KL, sampler against trainer", ["kl_sample_train_v2"], []],
  ["Tokens per answer", ["train/completion_lengths"], ["eval/completion_lengths"]],
  ["Entropy of the policy", ["policy/entropy"], []],
  ["From the reference, nats per token", ["policy/kl_reference", "policy/implicit_reward_gap"], []],
  ["Share of the gain that transfers", [], ["eval/panel/share_of_gain"]],
  ["Groups without signal", ["groups/without_signal"], [], { share: true }],
  ["Cut off answers", ["train/truncated"], ["eval/truncated"], { share: true }],
  ["Seconds per step", ["time/step"], []],
];
const ASIDE = 3; // pixels: the margins of two evaluations of one step must not hide each other
// Success is that of all rollouts; of a foreign environment, which counts none, that of the batch.
const MAIN = ["reward/mean", "train/percent_correct", "reward/success"];
const LABELS = {
  "reward/mean": "reward, mean of the batch",
  "train/percent_correct": "share of successes",
  "reward/success": "share of successes",
  [HELD_OUT]: "held-out tasks, 95 %",
  [GREEDY]: "held-out, greedy, 95 %",
  accuracy: "pairs in the right order",
  eval_accuracy: "held-out pairs",
};

export function curves() {
  const [large, small] = [h("div", { class: "charts large" }), h("div", { class: "charts" })];
  const picker = h("select", { "aria-label": "Add a curve" });
  const more = h("label", { class: "quiet" }, "Another curve ", picker);
  const element = h("section", null, large, small, more);
  const charts = new Map(); // title -> chart
  const added = [];
  let shown = null;
  picker.addEventListener("change", () => {
    added.push(picker.value);
    element.dispatchEvent(new CustomEvent("wanted"));
  });

  function place(into, specs) {
    const wanted = specs.map((spec) => spec.title);
    for (const [title, one] of charts) {
      if (one.element.parentNode === into && !wanted.includes(title)) {
        one.close();
        one.element.remove();
        charts.delete(title);
      }
    }
    for (const spec of specs) {
      if (!charts.has(spec.title)) charts.set(spec.title, chart(spec));
      const one = charts.get(spec.title);
      if (one.element.parentNode !== into) into.append(one.element);
      one.show(spec.data);
    }
  }

  function offer(names) {
    const known = new Set([...MAIN, ...PAIRS, HELD_OUT, ...SMALL.flatMap(([, trained, held]) => [...trained, ...held]), ...added]);
    const rest = names.filter((name) => !known.has(name) && !name.endsWith("_stderr"));
    more.hidden = rest.length === 0;
    if (picker.options.length !== rest.length + 1) {
      fill(picker, h("option", { value: "" }, "…"), rest.map((name) => h("option", { value: name }, name)));
    }
  }

  return {
    element,
    names: () => [...MAIN, ...PAIRS, ...SMALL.flatMap(([, trained]) => trained), ...added],
    show(metrics, view) {
      shown = reading(metrics, view);
      place(large, view.kind === "reward" ? pairsChart(shown) : mainCharts(shown));
      const others = added.map((name) => (name.startsWith("eval/") ? [name, [], [name]] : [name, [name], []]));
      place(small, [...SMALL, ...others].map((spec) => smallChart(shown, spec)).filter((spec) => spec.data.series.length));
      offer(metrics.names);
    },
    close: () => charts.forEach((one) => one.close()),
  };
}

// What the server told, as series of one metric each.
function reading({ columns, evaluations, each }, view) {
  return {
    has: (name) => (columns[name] ?? evaluations[name] ?? []).some((value) => value !== null),
    equal: (one, other) => String(columns[one]) === String(columns[other]),
    values: (name) => columns[name] ?? [],
    trained: (name, colour, label) => ({
      kind: "line", colour, label: each > 1 ? `${label} (means of ${each} steps)` : label,
      steps: columns.step, values: columns[name],
    }),
    held: (name, colour, label, aside) => ({
      kind: "points", colour, label, aside, steps: evaluations.step, values: evaluations[name], margins: evaluations.margins[name],
    }),
    // while a run goes on, its large charts show how far it has to go
    large: (series) => ({ series, marks: view.marks, last: view.terminal ? 0 : view.total_steps }),
    small: (series) => ({ series, marks: view.marks, last: 0 }),
  };
}

// Reward and held-out share in one, where a reward is such a share; else one chart for each.
function mainCharts(shown) {
  const [reward, ofAll, ofBatch] = MAIN;
  const success = shown.has(ofAll) ? ofAll : ofBatch;
  const held = [
    ...(shown.has(HELD_OUT) ? [shown.held(HELD_OUT, 2, LABELS[HELD_OUT], -ASIDE)] : []),
    ...(shown.has(GREEDY) ? [shown.held(GREEDY, 3, LABELS[GREEDY], ASIDE)] : []),
  ];
  const lines = (...names) => names.filter(shown.has).map((name) => shown.trained(name, Math.min(1, MAIN.indexOf(name)), LABELS[name]));
  const pays = !shown.has(ofBatch) || shown.equal(reward, ofBatch); // a reward of 0 and 1 is the batch's success
  if (pays && isShare(shown.values(reward))) {
    const apart = shown.has(ofAll) && !shown.equal(reward, ofAll) ? [ofAll] : []; // groups were dropped
    return [{ title: "Reward", share: true, height: 300, data: shown.large([...lines(reward, ...apart), ...held]) }];
  }
  const solved = [...lines(success), ...held];
  return [
    { title: "Reward", height: 240, data: shown.large(lines(reward)) },
    ...(solved.length ? [{ title: "Solved", share: true, height: 240, data: shown.large(solved) }] : []),
  ];
}

// Of a reward model: how many pairs it puts in the right order.
function pairsChart(shown) {
  const [batch, heldOut] = PAIRS;
  const series = [
    ...(shown.has(batch) ? [shown.trained(batch, 0, LABELS[batch])] : []),
    ...(shown.has(heldOut) ? [{ ...shown.trained(heldOut, 2, LABELS[heldOut]), kind: "points" }] : []),
  ];
  return [{ title: "Accuracy", share: true, height: 300, data: shown.large(series) }];
}

function isShare(values) {
  return values.every((value) => value === null || (value >= 0 && value <= 1));
}

function smallChart(shown, [title, trained, held, options = {}]) {
  const series = [
    ...trained.filter(shown.has).map((name) => shown.trained(name, 0, name)),
    ...held.filter(shown.has).map((name) => shown.held(name, 2, name)),
  ];
  return { title, ...options, data: shown.small(series) };
}
