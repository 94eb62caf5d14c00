// What the policy answered, step by step. Owns: which step's groups are read. Never: changes them under a reader.

import { get, runPath } from "./api.js";
import { h, say } from "./dom.js";
import { figure, share } from "./format.js";
import { groupList } from "./groups.js";
import { latest } from "./latest.js";

const PAUSE_MS = 3000; // between two looks at a step that grows
const FINAL = ["trained", "dropped", "failed"]; // states of a group; one that is unused may be in a later batch

export function rollouts(id) {
  const said = h("p", { class: "quiet", role: "status" }, "No rollouts yet.");
  const number = h("input", { type: "number", min: 0, "aria-label": "Step", on: { change: () => read(number.valueAsNumber) } });
  const turn = (label, by) => h("button", { type: "button", "aria-label": label, on: { click: () => read(step + by) } }, by < 0 ? "‹" : "›");
  const [back, on] = [turn("Step before", -1), turn("Step after", 1)];
  const newest = h("button", { type: "button", hidden: true, on: { click: () => read(null) } });
  const controls = h("div", { class: "controls", hidden: true }, h("span", { class: "group" }, "step ", back, number, on), newest);
  const list = groupList({
    open: ({ place }) => get(runPath(id, `groups/${step}/${place}`)),
    search(text) {
      wanted = text;
      searching.run();
    },
  });
  list.element.hidden = true;
  const element = h("section", { class: "rollouts" }, h("h2", null, "Rollouts"), controls, said, list.element);
  const searching = latest(() => read(step)); // each letter asks
  let step = null;
  let wanted = "";
  let asked = 0;
  let readAt = 0;
  let isReading = false;
  let hasEnded = false; // the run
  let isSettled = false; // nothing more comes to the groups that are shown

  async function read(other) {
    const turn = ++asked;
    const wasOver = hasEnded;
    [readAt, isReading] = [Date.now(), true];
    try {
      const answer = await get(runPath(id, "groups"), { step: Number.isFinite(other) ? other : null, search: wanted });
      if (turn !== asked) return;
      show(answer);
      isSettled = wasOver || (answer.steps[1] > step && answer.groups.every(({ state }) => FINAL.includes(state)));
    } catch (error) {
      if (turn === asked) say(said, error.message);
    }
    isReading = false;
  }

  function show(answer) {
    const isFirst = step === null;
    const anew = step !== answer.step;
    step = answer.step;
    controls.hidden = list.element.hidden = false;
    number.value = step;
    number.min = answer.steps[0];
    back.disabled = step <= answer.steps[0];
    offer(answer.steps[1]);
    say(said, sentence(answer));
    list.show(answer.groups, { anew, first: isFirst });
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
    show({ kind, terminal, rollouts: [last] }) {
      element.hidden = kind !== "rl"; // others sample nothing
      if (last === undefined) return;
      if (step !== null) offer(last);
      hasEnded = terminal;
      // groups come to the newest step, advantages after it: lines are added, and open ones stay
      if (!isSettled && (terminal || (!isReading && Date.now() - readAt > PAUSE_MS))) read(step);
    },
  };
}

function sentence({ figures, whole }) {
  const { groups, rollouts: count, mean_score, mean_score_sampled, mean_tokens, truncated, distinct, dropped, failed } = figures;
  const words = [`${count} rollouts in ${groups} ${groups === 1 ? "group" : "groups"}`];
  if (mean_score !== null) words.push(`mean score ${figure(mean_score)}`);
  const codes = Object.entries(dropped);
  if (codes.length) words.push(`dropped: ${codes.map(([code, times]) => `${times} × ${code.replaceAll("_", " ")}`).join(", ")}`, `mean score of all that was sampled ${figure(mean_score_sampled)}`);
  if (count) words.push(`${figure(mean_tokens)} tokens`, `${share(truncated)} cut off`, `${share(distinct)} distinct answers`);
  const failures = Object.entries(failed);
  if (failures.length) words.push(`failed: ${failures.map(([code, times]) => `${times} × ${code}`).join(", ")}`);
  if (!whole) words.push("the step is too large; these are its first groups");
  return words.join(" · ");
}
