// What a run has come to. Owns: the gain with its interval, the weights, answers before and after.
// Never: asks before there is a second evaluation or an end: reading all samples takes its time.

import { get, runPath } from "./api.js";
import { copyable, fill, h } from "./dom.js";
import { figure, share } from "./format.js";

const NAMES = {
  "eval/percent_correct": "held-out tasks solved", "eval/percent_correct_greedy": "held-out tasks solved, greedy",
  "eval/mean_score": "held-out mean score", "eval/loss_per_token": "held-out loss per token", "eval/loss": "held-out loss",
  "eval/rewards/accuracies": "held-out pairs in order",
};

export function results(id) {
  const element = h("section", { class: "results", hidden: true });
  let told = "";

  return {
    element,
    async evaluated(count, { status, terminal, failure }) {
      const now = `${count} ${status}`;
      if (now === told || (count < 2 && !terminal)) return;
      told = now;
      try {
        const [result, { tasks }] = await Promise.all([get(runPath(id, "results")), get(runPath(id, "evals"))]);
        element.hidden = count === 0 && !result.weights?.sampler;
        const notes = (result.notes ?? []).filter((note) => !failure || !note.startsWith(`${failure.code}: `)); // told above
        fill(
          element, h("h2", null, terminal ? "Results" : "Results so far"), gains(result),
          notes.map((note) => h("p", { class: "quiet" }, note)), weights(result.weights), examples(tasks),
        );
      } catch {
        told = ""; // at the next change again
      }
    },
  };
}

function gains({ improvement = {}, baseline = {} }) {
  const rows = Object.entries(improvement).map(([name, gain]) => gained(name, gain, baseline[name]));
  if (rows.length === 0) return h("p", { class: "quiet" }, "Fewer than two evaluations: no comparison is possible.");
  return h("ul", { class: "gains" }, rows);
}

function gained(name, { delta, ci95, certain, num_tasks }, before) {
  const isShare = name.includes("percent_correct") || name.includes("accuracies");
  const better = name.includes("loss") ? delta < 0 : delta > 0;
  const points = (value) => `${value > 0 ? "+" : ""}${isShare ? `${figure(100 * value)}` : figure(value)}`;
  const unit = isShare ? " points" : "";
  const verdict = certain ? (better ? "better" : "worse") : "not certain";
  return h(
    "li", null, `${NAMES[name] ?? name}: `, h("b", null, `${points(delta)}${unit}`),
    ci95 ? ` (95 %: ${points(ci95[0])} to ${points(ci95[1])})` : "",
    before === undefined ? "" : `, from ${isShare ? share(before) : figure(before)}`,
    num_tasks ? `, ${num_tasks} tasks` : "", " ",
    ci95 ? h("span", { class: `verdict ${certain ? (better ? "good" : "bad") : ""}` }, verdict) : null,
  );
}

function weights({ sampler, state, peft_dir, use = [], step } = {}) {
  const rows = [["adapter (PEFT)", peft_dir], ["to sample from", sampler], ["to resume from", state], ["try it", use[0]]];
  const known = rows.filter(([, path]) => path);
  if (known.length === 0) return null;
  return h(
    "div", null, h("h3", null, `Weights after step ${step}`),
    h("dl", { class: "paths" }, known.map(([label, path]) => [h("dt", null, label), h("dd", null, copyable(path))])),
  );
}

function examples(tasks) {
  if (tasks.length === 0) return null;
  return h(
    "details", null, h("summary", null, "Held-out tasks, before and after"),
    tasks.map(({ prompt, before, after }) => h(
      "div", { class: "example" }, h("pre", { class: "prompt" }, prompt),
      h("div", { class: "pair" }, answered("before", before), answered("after", after)),
    )),
  );
}

function answered(when, { completion, score }) {
  return h("div", null, h("p", { class: "quiet" }, `${when}, score ${figure(score)}`), h("pre", null, completion));
}
