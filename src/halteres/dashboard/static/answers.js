// One group, opened: its task, and all answers side by side, turns apart, tokens tinted.
// Owns: what of a group is drawn, and that tokens become elements only where they are seen. Never: asks for anything.

import { h } from "./dom.js";
import { figure, share } from "./format.js";

// a token below the first of these probabilities is tinted, below the last one most
const BOUNDS = [0.5, 0.1, 0.01];
const LEVELS = 3;
const AHEAD = "400px"; // so far below the window tokens are drawn

// group: as `whole` of rollout_groups.py gives it. shown: which of its rollouts
export function answers(group, shown) {
  const strongest = Math.max(...group.rollouts.map(({ advantage }) => Math.abs(advantage ?? 0)));
  const seen = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach(draw), { rootMargin: AHEAD });
  const waiting = new Map(); // article -> what draws its tokens

  function draw({ target }) {
    seen.unobserve(target);
    waiting.get(target)?.forEach((one) => one());
    waiting.delete(target);
  }

  function answer(at) {
    const { parts = [], ...rollout } = group.rollouts[at];
    const drawn = parts.map((part) => stretch(part, strongest));
    const element = h("article", { class: "answer", "aria-label": `Answer ${at + 1}` }, heading(rollout, parts), drawn.map(({ element }) => element));
    waiting.set(element, drawn.map(({ tokens }) => tokens).filter(Boolean));
    if (waiting.get(element).length) seen.observe(element);
    return element;
  }

  const hidden = group.rollouts.length - shown.length;
  return h(
    "div", { class: "opened" },
    group.why ? h("p", { class: "why" }, group.why) : null,
    group.prompt ? h("pre", { class: "prompt", tabindex: 0, "aria-label": "Prompt" }, group.prompt) : null,
    group.note ? h("p", { class: "quiet" }, group.note) : null,
    leftOut(group),
    h("div", { class: "answers" }, shown.map(answer)),
    hidden ? h("p", { class: "quiet" }, `${hidden} ${hidden === 1 ? "answer does" : "answers do"} not match.`) : null,
    failures(group.failures),
    group.item === null || group.item === undefined ? null : h("details", null, h("summary", null, "Task"), h("pre", null, JSON.stringify(group.item, null, 1))),
  );
}

function leftOut({ left_out: what = [], left_out_by: by }) {
  return what.length ? h("p", { class: "quiet" }, `Without their ${what.join(" and ")}: ${by} is reached.`) : null;
}

function failures(failed) {
  if (!Array.isArray(failed) || !failed.length) return null;
  const lines = failed.map(({ code, why }) => h("li", null, h("b", null, code), ` ${why}`));
  return h("details", null, h("summary", null, `${failed.length} failed ${failed.length === 1 ? "attempt" : "attempts"}`), h("ul", { class: "failed" }, lines));
}

function heading({ score, rank, advantage, rewards = {}, tokens, outcome, finish, masked, figures }, parts) {
  const facts = [`${tokens} tokens`, outcome, finish === "length" ? "cut off" : null, masked ? "masked: nothing is learnt from it" : null, figures];
  const probability = mean(parts.flatMap(({ logprobs = [] }) => logprobs));
  if (probability !== null) facts.push(`mean probability ${share(Math.exp(probability))}`);
  const values = Object.entries(rewards).map(([name, value]) => h("span", { class: "component" }, `${name} `, h("b", null, figure(value))));
  return h(
    "header", null,
    h("span", { class: `score ${score > 0 ? "good" : "bad"}` }, score === undefined || score === null ? "no score" : `score ${figure(score)}`),
    advantage === undefined || advantage === null ? null : h("span", { class: `advantage ${advantage ? sign(advantage) : "quiet"}` }, `advantage ${advantage > 0 ? "+" : ""}${figure(advantage)}`),
    rank ? h("span", { class: `rank ${rank}` }, rank) : null,
    values,
    h("span", { class: "quiet" }, facts.filter(Boolean).join(" · ")),
  );
}

// One stretch of a rollout. `tokens` replaces its text by tinted tokens, and is missing where there are none.
function stretch({ text, sampled, label, lengths, logprobs, ids, advantage, reward }, strongest) {
  const level = advantage && strongest ? Math.ceil((LEVELS * Math.abs(advantage)) / strongest) : 0;
  const classes = sampled ? `completion ${level ? `${sign(advantage)}${Math.min(LEVELS, level)}` : ""}` : "observed";
  const words = [label, reward === undefined || reward === null ? null : `reward ${figure(reward)}`].filter(Boolean);
  const pre = h("pre", { class: classes, tabindex: 0 }, text);
  const element = words.length ? h("div", { class: "part" }, h("p", { class: "quiet" }, words.join(" · ")), pre) : pre;
  // What is struck out of a text makes it another one, which its tokens do not fit.
  const fits = sampled && lengths && lengths.reduce((sum, one) => sum + one, 0) === text.length;
  return { element, tokens: fits ? () => pre.replaceChildren(...tinted(text, lengths, logprobs, ids)) : null };
}

// Tokens that make one character together are one piece, as unlikely as the least likely of them.
function tinted(text, lengths, logprobs, ids) {
  const pieces = [];
  let begin = 0;
  let first = 0;
  lengths.forEach((length, at) => {
    const isLast = at === lengths.length - 1;
    if (!length && !isLast) return;
    const piece = document.createElement("span");
    const probability = logprobs ? Math.exp(Math.min(...logprobs.slice(first, at + 1))) : null;
    const level = probability === null ? 0 : BOUNDS.filter((bound) => probability < bound).length;
    if (level) piece.className = `p${level}`;
    if (!length) piece.className += " end"; // it says nothing but that the answer ends
    piece.textContent = text.slice(begin, (begin += length));
    piece.title = [probability === null ? null : share(probability), ids ? `token ${ids.slice(first, at + 1).join(" ")}` : null].filter(Boolean).join(", ");
    pieces.push(piece);
    first = at + 1;
  });
  return pieces;
}

export function legend() {
  const levels = BOUNDS.map((bound, at) => h("span", { class: `p${at + 1}` }, `below ${100 * bound} %`));
  return h(
    "p", { class: "tints quiet" },
    h("span", { class: "of-probability" }, "The policy gave these tokens a probability ", levels),
    h("span", { class: "of-advantage" }, "What is made ", h("span", { class: "up2" }, "more likely"), h("span", { class: "down2" }, "less likely"), " by its advantage"),
    h("span", null, " · grey: given to it, never trained on"),
  );
}

function sign(value) {
  return value > 0 ? "up" : "down";
}

function mean(values) {
  return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
}
