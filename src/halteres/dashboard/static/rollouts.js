// What the policy answered. Owns: which step's rollouts are read, best, worst or any. Never: changes them under a reader.

import { get, runPath } from "./api.js";
import { fill, h, say } from "./dom.js";
import { figure, share } from "./format.js";

const WHICH = ["best", "worst", "random"];
const DEFAULT = "random";

export function rollouts(id) {
  const said = h("p", { class: "quiet", role: "status" }, "No rollouts yet.");
  const number = h("input", { type: "number", min: 0, "aria-label": "Step" });
  const turn = (label, by) => h("button", { type: "button", "aria-label": label, on: { click: () => read(step + by) } }, by < 0 ? "‹" : "›");
  const [back, on] = [turn("Step before", -1), turn("Step after", 1)];
  const newest = h("button", { type: "button", hidden: true, on: { click: () => read(null) } });
  const choices = WHICH.map((one) => h("button", { type: "button", "aria-pressed": String(one === DEFAULT), on: { click: () => choose(one) } }, one));
  const controls = h("div", { class: "controls", hidden: true }, h("span", { class: "group" }, choices), h("span", { class: "group" }, "step ", back, number, on), newest);
  const list = h("div", { class: "rollouts" });
  const element = h("section", null, h("h2", null, "Rollouts"), controls, said, list);
  let which = DEFAULT;
  let step = null;
  let asked = 0;
  number.addEventListener("change", () => read(number.valueAsNumber));

  function choose(one) {
    which = one;
    choices.forEach((choice) => choice.setAttribute("aria-pressed", String(choice.textContent === one)));
    read(step);
  }

  async function read(wanted) {
    const turn = ++asked;
    try {
      const answer = await get(runPath(id, "rollouts"), { step: Number.isFinite(wanted) ? wanted : null, which });
      if (turn === asked) show(answer);
    } catch (error) {
      if (turn !== asked) return;
      if (error.body?.nearest !== undefined && error.body.nearest !== step) read(error.body.nearest);
      else say(said, error.message);
    }
  }

  function show(answer) {
    step = answer.step;
    controls.hidden = false;
    number.value = step;
    number.min = answer.steps[0];
    back.disabled = step <= answer.steps[0];
    offer(answer.steps[1]);
    say(said, figures(answer.figures));
    fill(list, answer.rollouts.map(rollout));
  }

  // There are newer ones: to be asked for, not to be shown in the place of what is just being read.
  function offer(last) {
    number.max = last;
    on.disabled = step >= last;
    newest.hidden = last <= step;
    say(newest, `newest: ${last}`);
  }

  return {
    element,
    show({ kind, rollouts: [last] }) {
      element.hidden = kind === "reward"; // such a run samples nothing
      if (last === undefined) return;
      if (step === null) read(null);
      else offer(last);
    },
  };
}

function figures({ rollouts: count, groups, mean_score, mean_tokens, truncated, distinct, failed, last_failure, quarantined_tasks, last_quarantined, note }) {
  const said = [`${count} rollouts in ${groups} ${groups === 1 ? "group" : "groups"}`];
  if (mean_score !== undefined) said.push(`mean score ${figure(mean_score)}`, `${figure(mean_tokens)} tokens`, `${share(truncated)} cut off`, `${share(distinct)} distinct`);
  if (failed) said.push(`failed: ${Object.entries(failed).map(([code, times]) => `${times} × ${code}`).join(", ")} (${last_failure})`);
  if (quarantined_tasks) said.push(`${Object.values(quarantined_tasks).reduce((sum, one) => sum + one)} tasks quarantined (the last: ${last_quarantined.code}: ${last_quarantined.why})`);
  return [...said, note].filter(Boolean).join(" · ");
}

function rollout({ prompt, completion, turns, outcome, score, tokens, finish, times, group_scores, item }) {
  const facts = [`${tokens} tokens`, outcome, finish === "length" ? "cut off" : finish, times ? `given ${times} times` : null].filter(Boolean);
  return h(
    "article", { class: "rollout" },
    h("header", null, h("span", { class: `score ${score > 0 ? "good" : "bad"}` }, `score ${figure(score)}`), h("span", { class: "quiet" }, facts.join(" · "))),
    h("pre", { class: "prompt", tabindex: 0 }, prompt),
    ...(turns ? turns.flatMap(turn) : [h("pre", { class: "completion", tabindex: 0 }, completion)]),
    h("details", null, h("summary", null, "Task and its group"), h("pre", null, `${JSON.stringify(item, null, 1)}\ngroup: ${JSON.stringify(group_scores)}`)),
  );
}

function turn({ text, observation, reward, left_out }) {
  if (left_out) return [h("p", { class: "quiet" }, `${left_out} turns left out`)];
  return [
    h("pre", { class: "completion", tabindex: 0 }, text ?? ""),
    ...(reward ? [h("p", { class: "quiet" }, `reward ${figure(reward)}`)] : []),
    ...(observation ? [h("pre", { class: "prompt", tabindex: 0 }, observation)] : []),
  ];
}
