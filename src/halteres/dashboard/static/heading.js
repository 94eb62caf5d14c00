// The head of a run's page: what it is, how far it is, the button that stops it.
// Owns: asking before it stops. Never: decides whether it may.

import { post, runPath } from "./api.js";
import { badge, fill, h, say } from "./dom.js";
import { ago, between, duration, figure, moment, share } from "./format.js";
import { notes } from "./notes.js";

const HELD_OUT = "eval/percent_correct";

// `acts`: whether the run can be stopped here, and its notes changed
export function heading(id, { acts = true } = {}) {
  const state = h("span");
  const name = h("h1");
  const about = h("p", { class: "quiet about" });
  const note = h("p", { class: "note" });
  const waits = h("p", { class: "note", role: "status" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Steps done" });
  const facts = h("dl", { class: "facts" });
  const [dialog, ask] = stopping(id);
  const stop = h("button", { type: "button", class: "danger", on: { click: () => ask(name.textContent) } }, "Stop");
  const chat = h("a", { class: "button", href: `#/chat/${encodeURIComponent(id)}` }, "Chat");
  const written = notes(id, { acts });
  const [again, resume] = [["again", "Start again with changes"], ["resume", "Resume"]].map(([way, label]) => h("button", { type: "button", on: { click: () => (location.hash = `#/${way}/${encodeURIComponent(id)}`) } }, label));
  const element = h("header", { class: "head" }, h("div", { class: "bar" }, state, name, chat, resume, again, stop), about, written.element, note, waits, progress, facts, dialog);
  let held = null;
  let last = null;

  function tell() {
    const { figures, seconds, eta_minutes, step_s } = last;
    fill(
      facts,
      fact("Step", `${last.step} / ${last.total_steps}`),
      figures.map((one) => fact(one.label, one.name === "eval_percent_correct" ? held ?? put(one) : put(one))),
      fact("Per step", duration(step_s)),
      last.terminal ? fact("Took", duration(seconds)) : fact("Time left", between(eta_minutes)),
      last.terminal ? null : fact("Health", last.health, last.health),
      counts("Failed rollouts", last.failed_rollouts),
      counts("Quarantined tasks", last.quarantined_tasks),
    );
  }

  return {
    element,
    // Held-out share now, and before.
    held({ [HELD_OUT]: values = [], margins = {} }) {
      const known = values.flatMap((value, at) => (value === null ? [] : [[value, margins[HELD_OUT]?.[at]]]));
      if (known.length === 0) return;
      const [value, margin] = known.at(-1);
      const before = known.length > 1 ? `, was ${share(known[0][0])}` : "";
      held = `${share(value)}${margin ? ` ± ${figure(100 * margin, 2)}` : ""}${before}`;
      tell();
    },
    show(view) {
      last = view;
      fill(state, badge(view.status, view.phase));
      say(name, view.name);
      fill(
        about, `${view.environment} · ${view.model} · started ${ago(view.created_at)} (${moment(view.created_at)})`,
        view.policy && view.policy !== "default" ? ` · policy ${view.policy}` : null,
        view.resumed_from ? [" · goes on from ", h("a", { href: `#/runs/${encodeURIComponent(view.resumed_from)}` }, view.resumed_from)] : null,
      );
      written.show(view.notes);
      say(note, view.note ?? "");
      say(waits, view.no_batch ? `No batch yet: ${view.no_batch}` : "");
      progress.max = Math.max(1, view.total_steps);
      progress.value = view.step;
      progress.className = view.status;
      chat.hidden = view.kind === "reward" || !acts;
      stop.hidden = view.terminal || !acts;
      [again.hidden, resume.hidden] = [view.kind !== "rl" || !acts, !view.can_go_on || !acts];
      stop.disabled = view.status === "stopping";
      tell();
    },
  };
}

function put({ value, form }) {
  if (form === "share") return share(value);
  return value === null || form === "number" ? figure(value) : `${figure(value)} ${form}`;
}

// Nothing where none are counted.
function counts(label, byCode = {}) {
  const said = Object.entries(byCode).map(([code, times]) => `${times} × ${code}`);
  return said.length ? fact(label, said.join(", ")) : null;
}

export function fact(label, value, kind) {
  return h("div", null, h("dt", null, label), h("dd", { class: kind }, value));
}

// The question, and what came of it.
function stopping(id) {
  const title = h("h2", { id: "stop-title" });
  const said = h("p", { role: "status" }, "It writes a checkpoint first: training can go on from there.");
  const buttons = [
    h("button", { type: "button", class: "danger", on: { click: () => send("now") } }, "Stop now"),
    h("button", { type: "button", on: { click: () => send("after_step") } }, "Stop after this step"),
  ];
  const cancel = h("button", { type: "button", on: { click: () => dialog.close() } }, "Let it run");
  const dialog = h("dialog", { "aria-labelledby": "stop-title" }, title, said, h("div", { class: "choices" }, buttons, cancel));

  async function send(mode) {
    buttons.forEach((button) => (button.disabled = true));
    say(said, "Stopping …");
    try {
      say(said, `${(await post(runPath(id, "stop"), { mode })).message}.`);
      say(cancel, "Close");
    } catch (error) {
      say(said, error.message);
      buttons.forEach((button) => (button.disabled = false));
    }
  }

  return [dialog, (name) => {
    say(title, `Stop ${name}?`);
    dialog.showModal();
    cancel.focus();
  }];
}
