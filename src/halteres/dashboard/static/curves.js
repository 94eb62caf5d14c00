// Which charts a run has. Owns: the metrics of each, which are told together. Never: draws (`chart.js`).

import { board, chartControls, curvePicker } from "./controls.js";
import { h } from "./dom.js";

const HELD_OUT = "eval/percent_correct";
const GREEDY = "eval/percent_correct_greedy";
const PAIRS = ["accuracy", "eval_accuracy"]; // of a run that trains a reward model: of each batch, held out
const LOSSES = { sft: ["train/loss_per_token", "eval/loss_per_token"], dpo: ["train/loss", "eval/loss"] }; // of a run on a file

// title, metrics over the steps, metrics of evaluations; a chart without any value is not shown
const SMALL = [
  ["Loss per token", ["train/loss_per_token"], [], { but: "sft" }],
  ["Pairs in order", ["rewards/accuracies"], ["eval/rewards/accuracies"], { share: true }],
  ["Margin of the chosen answer", ["rewards/margins"], ["eval/rewards/margins"]],
  ["Implicit reward, chosen", ["rewards/chosen"], ["eval/rewards/chosen"]],
  ["Implicit reward, rejected", ["rewards/rejected"], ["eval/rewards/rejected"]],
  ["Loss", ["loss", "eval_loss"], []],
  ["KL, sampler against trainer", ["kl_sample_train_v2"], [], { zeros: false }],
  ["Tokens per answer", ["train/completion_lengths"], ["eval/completion_lengths"]],
  ["Gradient norm", ["train/grad_norm"], []],
  ["Entropy of the policy", ["policy/entropy"], []],
  ["From the reference, nats per token", ["policy/kl_reference", "policy/implicit_reward_gap"], [], { zeros: false }],
  ["Variance explained by the critic", ["critic/explained_variance"], []],
  ["Share of the gain that transfers", [], ["eval/panel/share_of_gain"]],
  ["Groups of equal scores", ["groups/without_signal"], [], { share: true }],
  ["Cut off answers", ["train/truncated"], ["eval/truncated"], { share: true, zeros: false }],
  ["Seconds per step", ["time/step"], []],
];
const DROPPED = "groups/dropped/";
const SENT = ["groups/sent", "groups/kept"];
const ASIDE = 3; // pixels: the margins of two evaluations of one step must not hide each other
const ALL = "rollouts/score"; // of every rollout; the batch has those alone whose groups were kept
const REWARD = "reward/mean";
// Success is that of all rollouts; of a foreign environment, which counts none, that of the batch.
const [SUCCESS_OF_ALL, SUCCESS] = ["train/percent_correct", "reward/success"];
const MAIN = [ALL, REWARD, SUCCESS_OF_ALL, SUCCESS];
const LABELS = {
  [ALL]: "score, all rollouts",
  [REWARD]: "reward, mean of the batch",
  [SUCCESS_OF_ALL]: "share of successes",
  [SUCCESS]: "share of successes",
  [HELD_OUT]: "held-out tasks, 95 %",
  [GREEDY]: "held-out, greedy, 95 %",
  accuracy: "pairs in the right order",
  eval_accuracy: "held-out pairs",
};
const KEPT_ALONE = "reward, groups kept for training";

export function curves() {
  const [large, small] = [h("div", { class: "charts large" }), h("div", { class: "charts" })];
  const more = curvePicker((name) => { added.push(name); ask(); });
  const controls = chartControls(redraw);
  const element = h("section", null, controls.element, large, small, more.element);
  const boards = [large, small].map((into) => board(into, controls));
  const added = [];
  let last = null; // what was drawn: metrics and view

  function ask() {
    element.dispatchEvent(new CustomEvent("wanted"));
  }

  // At once with the points that are there; then, of a long run, with those that lie between them.
  function redraw() {
    if (last === null) return;
    draw(...last);
    if (last[0].each > 1) ask();
  }

  function offer(names, drawn) {
    const known = new Set([...MAIN, ...PAIRS, ...Object.values(LOSSES).flat(), HELD_OUT, GREEDY, ...drawn]);
    more.offer(names.filter((name) => !known.has(name) && !name.endsWith("_stderr")));
  }

  // `part`: the same of the steps that are shown alone, where all of them have more points than can be drawn.
  function draw(metrics, view, part = metrics) {
    const shown = reading(part, view);
    const main = largeCharts(shown, view.kind);
    const others = added.map((name) => (name.startsWith("eval/") ? [name, [], [name]] : [name, [name], []]));
    const mine = SMALL.filter(([, , , options]) => options?.but !== view.kind);
    const specs = [...mine.filter(([, trained, held, options]) => options?.zeros !== false || [...trained, ...held].some(shown.moves)), ...others];
    const below = [droppedChart(shown), ...specs.map((spec) => smallChart(shown, spec))];
    controls.reach(0, Math.max(1, view.terminal ? 0 : view.total_steps, ...metrics.columns.step, ...metrics.evaluations.step));
    boards[0].show(main);
    boards[1].show(below.filter((spec) => spec.data.series.length));
    offer(metrics.names, specs.flatMap(([, trained, held]) => [...trained, ...held]));
  }

  return {
    element,
    names: () => [...MAIN, ...PAIRS, ...Object.values(LOSSES).flat(), ...SENT, `${DROPPED}*`, ...SMALL.flatMap(([, trained]) => trained), ...added],
    // The steps whose points are wanted in full; null: all.
    within: () => controls.within()?.map(Math.round) ?? null,
    show(metrics, view, part) {
      last = [metrics, view];
      draw(metrics, view, part);
    },
    close: () => boards.forEach((one) => one.close()),
  };
}

// What the server told, as series of one metric each.
function reading({ columns, evaluations, each }, view) {
  return {
    has: (name) => (columns[name] ?? evaluations[name] ?? []).some((value) => value !== null),
    moves: (name) => (columns[name] ?? evaluations[name] ?? []).some((value) => value),
    equal: (one, other) => String(columns[one]) === String(columns[other]),
    values: (name) => columns[name] ?? [],
    dropped: Object.keys(columns).filter((name) => name.startsWith(DROPPED)),
    steps: columns.step,
    trained: (name, colour, label) => ({
      kind: "line", colour, label: each > 1 ? `${label} (means of ${each} steps)` : label,
      xs: columns.step, values: columns[name],
    }),
    held: (name, colour, label, aside) => ({
      kind: "points", colour, label, aside, xs: evaluations.step, values: evaluations[name], margins: evaluations.margins[name],
    }),
    // while a run goes on, its large charts show how far it has to go
    large: (series) => ({ series, marks: view.marks, last: view.terminal ? 0 : view.total_steps }),
    small: (series) => ({ series, marks: view.marks, last: 0 }),
  };
}

// By kind of run: what it is trained for.
function largeCharts(shown, kind) {
  if (kind === "reward") return pairsChart(shown);
  return LOSSES[kind] ? lossChart(shown, LOSSES[kind]) : mainCharts(shown);
}

// Of a policy that is trained on a file: the loss of each batch, and of held-out rows.
function lossChart(shown, [batch, heldOut]) {
  const series = [
    ...(shown.has(batch) ? [shown.trained(batch, 0, "each batch")] : []),
    ...(shown.has(heldOut) ? [shown.held(heldOut, 2, "held-out rows, 95 %")] : []),
  ];
  return [{ title: shown.has(heldOut) ? "Loss, of batches and held out" : "Loss of each batch", height: 300, data: shown.large(series) }];
}

// Reward and held-out share in one, where a reward is such a share; else one chart for each. Where groups were
// dropped, the batch's mean is that of the others alone: what all rollouts scored stands before it.
function mainCharts(shown) {
  const success = shown.has(SUCCESS_OF_ALL) ? SUCCESS_OF_ALL : SUCCESS;
  const held = [
    ...(shown.has(HELD_OUT) ? [shown.held(HELD_OUT, 2, LABELS[HELD_OUT], -ASIDE)] : []),
    ...(shown.has(GREEDY) ? [shown.held(GREEDY, 3, LABELS[GREEDY], ASIDE)] : []),
  ];
  const pays = !shown.has(SUCCESS) || shown.equal(REWARD, SUCCESS); // a reward of 0 and 1 is the batch's success
  const isOneChart = pays && isShare(shown.values(REWARD));
  // of an earlier version's run, which has no score of all, their successes stand for it
  const all = [ALL, ...(isOneChart ? [SUCCESS_OF_ALL] : [])].find((name) => shown.has(name) && !shown.equal(REWARD, name));
  const reward = [
    ...(all ? [shown.trained(all, 0, LABELS[all])] : []),
    ...(shown.has(REWARD) ? [shown.trained(REWARD, all ? 1 : 0, all ? KEPT_ALONE : LABELS[REWARD])] : []),
  ];
  if (isOneChart) return [{ title: "Reward", share: true, height: 300, data: shown.large([...reward, ...held]) }];
  const solved = [...(shown.has(success) ? [shown.trained(success, 1, LABELS[success])] : []), ...held];
  return [
    { title: "Reward", height: 240, data: shown.large(reward) },
    ...(solved.length ? [{ title: "Solved", share: true, height: 240, data: shown.large(solved) }] : []),
  ];
}

// Of all groups of a step, those that were not trained on, by reason.
function droppedChart(shown) {
  const counts = [...SENT, ...shown.dropped].map((name) => shown.values(name));
  const totals = shown.steps.map((_, at) => counts.reduce((sum, column) => sum + (column[at] ?? 0), 0));
  const series = shown.dropped.map((name, colour) => ({
    kind: "line", colour: Math.min(7, colour), label: name.slice(DROPPED.length).replaceAll("_", " "), xs: shown.steps,
    values: shown.values(name).map((count, at) => (totals[at] ? (count ?? 0) / totals[at] : null)),
  }));
  return { title: "Dropped groups", share: true, data: shown.small(series) };
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
    ...trained.filter(shown.has).map((name, at) => shown.trained(name, at, name)),
    ...held.filter(shown.has).map((name) => shown.held(name, 2, name)),
  ];
  const { share = false } = options;
  return { title, share, data: shown.small(series) };
}
