// Groups of rollouts, a line each, and one opened below its line.
// Owns: which of them are shown and in which order, and which stay open. Never: knows where they come from.

import { answers, legend } from "./answers.js";
import { fill, h, offerOptions, say } from "./dom.js";
import { figure } from "./format.js";

const MOST_LINES = 32; // groups, until all are asked for: what comes below them stays within reach
const MOST_CELLS = 64; // rollouts in a strip
const NUMBERS = ["score", "advantage", "tokens"];
const ORDERS = {
  "in order": null,
  "worst first": (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity),
  "best first": (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
  "widest spread first": (a, b) => (b.spread ?? -1) - (a.spread ?? -1),
};

// open(group): a promise of the whole group. search(text): asks for the groups anew, to be shown
export function groupList({ open, search }) {
  const bar = filters(search, draw);
  const said = h("p", { class: "quiet", role: "status" });
  const list = h("div", { "data-tint": "probability" });
  const tint = tints((name) => (list.dataset.tint = name));
  const rest = h("button", { type: "button", hidden: true, on: { click: all } });
  const element = h("div", { class: "group-list" }, h("div", { class: "controls" }, bar.elements, tint), legend(), said, list, rest);
  const opened = new Set(); // places: they stay open in another step
  let most = MOST_LINES;
  let groups = [];
  let lines = new Map();

  function draw() {
    const matching = new Map(groups.map((group) => [group, bar.matching(group)]));
    const shown = groups.filter((group) => matching.get(group));
    const order = bar.order();
    if (order) shown.sort(order);
    const scores = groups.flatMap(({ rollouts }) => rollouts.map(({ score }) => score)).filter(Number.isFinite);
    const range = [Math.min(...scores), Math.max(...scores)];
    const listed = shown.slice(0, most);
    for (const group of listed) {
      if (!lines.has(group.place)) lines.set(group.place, line(group, opened, open));
      lines.get(group.place).show(group, matching.get(group), range);
    }
    arrange(list, listed.map(({ place }) => lines.get(place).element));
    rest.hidden = listed.length === shown.length;
    say(rest, `Show all ${shown.length} groups`);
    const some = shown.length < groups.length ? `${shown.length} of ${groups.length} groups match.` : "";
    say(said, groups.length ? some : "No group.");
  }

  // The keyboard goes on at the first of those that were not there.
  function all() {
    most = Infinity;
    draw();
    list.children[MOST_LINES].querySelector("summary").focus();
  }

  return {
    element,
    // anew: they are others than before; first: the first of them is opened
    show(now, { anew = false, first = false } = {}) {
      groups = now;
      if (anew) lines = new Map();
      const shown = groups.slice(0, most).find(({ state }) => state === "trained") ?? groups[0];
      if (first && shown) opened.add(shown.place);
      bar.offer(groups);
      draw();
    },
  };
}

// Moves only what is out of place: a line that stays keeps its focus, and what was scrolled in it.
function arrange(list, wanted) {
  wanted.forEach((one, at) => {
    if (list.children[at] !== one) list.insertBefore(one, list.children[at] ?? null);
  });
  while (list.children.length > wanted.length) list.lastElementChild.remove();
}

// What is asked of groups and rollouts.
function filters(search, changed) {
  const on = { change: changed };
  let asked = "";
  const text = h("input", { type: "search", placeholder: "Search in texts", "aria-label": "Search in texts", on: { input: ask, search: ask } });
  const state = h("select", { "aria-label": "What became of a group", on });
  const outcome = h("select", { "aria-label": "Outcome of a rollout", on });
  const value = h("select", { "aria-label": "A value of a rollout", on });
  const low = h("input", { type: "number", step: "any", placeholder: "from", "aria-label": "Value from", on: { input: changed } });
  const high = h("input", { type: "number", step: "any", placeholder: "to", "aria-label": "Value to", on: { input: changed } });
  const order = h("select", { "aria-label": "Order of the groups", on }, Object.keys(ORDERS).map((name) => h("option", null, name)));
  const elements = [text, state, outcome, h("span", { class: "group" }, value, low, high), order];

  // Not every browser has an event for the cross that empties the field.
  function ask() {
    if (text.value === asked) return;
    asked = text.value;
    search(asked);
  }

  function fits(rollout) {
    if (outcome.value && !outcomes(rollout).includes(outcome.value)) return false;
    const number = NUMBERS.includes(value.value) ? rollout[value.value] : rollout.rewards?.[value.value];
    const [from, to] = [low.valueAsNumber, high.valueAsNumber];
    return (Number.isNaN(from) || number >= from) && (Number.isNaN(to) || number <= to);
  }

  return {
    elements,
    offer(groups) {
      const rollouts = groups.flatMap((group) => group.rollouts);
      offerOptions(state, "all groups", groups.map((group) => group.state));
      offerOptions(outcome, "any outcome", rollouts.flatMap(outcomes));
      offerOptions(value, null, [...NUMBERS, ...rollouts.flatMap(({ rewards }) => Object.keys(rewards ?? {}))]);
    },
    // The numbers of the rollouts that match; null: the group does not.
    matching(group) {
      if (state.value && group.state !== state.value) return null;
      const every = group.rollouts.map((rollout, at) => at).filter((at) => fits(group.rollouts[at]) && (group.found?.includes(at) ?? true));
      const isAsked = outcome.value || !Number.isNaN(low.valueAsNumber) || !Number.isNaN(high.valueAsNumber) || group.found;
      return every.length || !isAsked ? every : null;
    },
    order: () => ORDERS[order.value],
  };
}

function outcomes({ outcome, finish }) {
  return [outcome, finish === "length" ? "cut off" : null].filter(Boolean);
}

function tints(chosen) {
  const buttons = ["probability", "advantage", "off"].map((name) => h("button", { type: "button", "aria-pressed": String(name === "probability"), on: { click: () => choose(name) } }, name));
  function choose(name) {
    buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === name)));
    chosen(name);
  }
  return h("span", { class: "group" }, "colour tokens by ", buttons);
}

// One group: its line, and its answers once it is opened.
function line(group, opened, open) {
  const head = h("summary");
  const body = h("div");
  const element = h("details", { class: "group-line", open: opened.has(group.place), on: { toggle: toggled } }, head, body);
  let shown = [];
  let drawn = null; // which answers of it are below the line
  let whole = null; // a promise of all of it

  async function toggled() {
    if (!element.open) return void opened.delete(group.place);
    opened.add(group.place);
    const wanted = shown.join();
    if (drawn === wanted) return;
    drawn = wanted;
    try {
      whole ??= open(group);
      const all = await whole;
      if (drawn === wanted) fill(body, answers(all, shown));
    } catch (error) {
      drawn = whole = null;
      fill(body, h("p", { class: "quiet" }, error.message));
    }
  }

  return {
    element,
    show(now, matching, range) {
      if (now.state !== group.state) drawn = whole = null; // it was trained on meanwhile: there are advantages
      group = now;
      shown = matching;
      fill(head, summary(group, new Set(matching), range));
      if (element.open) toggled();
    },
  };
}

function summary({ label, task, rollouts, mean, spread, state, why, dropped, failures, facts = [] }, matching, range) {
  const notes = [...facts, state === "trained" && why ? why : null, failures > 0 ? `${failures} failed` : null].filter(Boolean);
  return [
    h("span", { class: "label-of" }, label),
    h("span", { class: "task" }, task),
    strip(rollouts, matching, range),
    h("span", { class: "mean" }, mean === undefined ? "–" : figure(mean), spread ? h("span", { class: "quiet" }, ` ± ${figure(spread, 2)}`) : null),
    h("span", { class: `state ${/^[a-z_]+$/.test(state) ? state : ""}`, title: why || null }, (state ?? "").replaceAll("_", " "), dropped ? h("span", { class: "quiet" }, ` ${dropped}`) : null),
    h("span", { class: "quiet notes" }, notes.join(" · ")),
  ];
}

// A bar for each rollout, as high as its score among those of all groups.
function strip(rollouts, matching, [low, high]) {
  const cells = rollouts.slice(0, MOST_CELLS).map(({ score }, at) => {
    const cell = document.createElement("i");
    const part = low < high ? (score - low) / (high - low) : 0.5;
    cell.style.height = Number.isFinite(score) ? `${12 + 88 * part}%` : "";
    cell.className = `${Number.isFinite(score) ? "" : "none"}${matching.has(at) ? "" : " off"}`;
    return cell;
  });
  const scores = rollouts.slice(0, MOST_CELLS).map(({ score }) => figure(score)).join(" ");
  const more = rollouts.length > MOST_CELLS ? ` and ${rollouts.length - MOST_CELLS} more` : "";
  return h("span", { class: "strip", role: "img", "aria-label": `scores ${scores}${more}`, title: `scores ${scores}${more}` }, cells, more ? h("span", { class: "quiet" }, more) : null);
}
