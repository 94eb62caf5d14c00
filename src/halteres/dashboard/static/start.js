// A run before it begins: its settings, what the tools' dry run says of them, the start of what was checked.
// Owns: what was typed, until it is started. Never: judges a value, or starts what was not checked: the tools do, as they do for agents.

import { get, post, runPath } from "./api.js";
import { fill, h, say } from "./dom.js";
import { between } from "./format.js";
import { told } from "./settings.js";

const TYPED = new Map(); // a view's address -> what was typed there; until this window is loaded anew
const CHANGED = "Changed since the check: check again.";

// way: "again" or "resume", with a run's id; "new", with an environment's name or none
export function startView(way, name) {
  const verb = { again: "Start again: ", resume: "Resume ", new: "New run " }[way];
  const draft = String(crypto.getRandomValues(new Uint32Array(1))[0]); // of this view alone
  const tool = (what, given = {}) => post(`/api/drafts/${draft}/${what}`, given);
  const title = h("h1", null, verb + name);
  const said = h("p", { class: "quiet", role: "status" }, "Reading the settings …");
  const fields = h("div", { class: "notes-form", on: { input: typed } });
  const [changes, more, verdict] = [h("ul"), h("details"), h("div", { class: "example", role: "status" })];
  const [check, start] = ["Check", "Start"].map((label) => h("button", { type: "submit", class: label === "Start" ? "button" : null }, label));
  const plan = h("section", { class: "plan" }, h("h2", null, "Changes"), changes, h("div", { class: "choices" }, check, start), verdict);
  const back = h("p", { class: "back" }, h("a", { href: "#/" }, "← All runs"));
  const form = h("form", { class: "columns", hidden: true, on: { submit: send } }, h("section", null, h("h2", null, "Settings"), fields), plan);
  const element = h("article", null, back, title, said, form);
  let [rows, checked, busy, closed, origin] = [[], null, false, false, { name, environment: name }];
  const select = (edits) => tool("select", { name: origin.environment, settings_of: way === "new" ? null : name, changes: edits });
  const edited = () => Object.fromEntries(rows.filter((row) => row.isChanged()).map((row) => [row.name, row.control.value]));
  const kept = location.hash;
  const run = (how) => tool("start", way === "resume" ? { ...how, resume_from: name, changes: edited() } : how);

  async function open() {
    const link = (one) => h("div", null, h("a", { href: `#/new/${encodeURIComponent(one)}` }, one));
    const own = h("input", { "aria-label": "A file of your own", placeholder: "/path/to/environment.py", required: true });
    const file = h("form", { class: "controls", on: { submit: (event) => { event.preventDefault(); location.hash = `#/new/${encodeURIComponent(own.value)}`; } } }, h("label", null, "A file of your own ", own), h("button", { type: "submit" }, "Open"));
    const line = ({ name: one, description, variants }) => [h("dt", null, link(one)), h("dd", null, description, variants.length ? h("details", null, h("summary", null, `${variants.length} variants`), variants.map(link)) : null)];
    if (name === "") {
      const { environments, broken } = await get("/api/environments");
      const wrong = broken.map((one) => h("p", { class: "problem" }, `${one.file} is broken: ${one.why}`));
      return fill(element, back, title, h("section", null, h("h2", null, "Environments"), h("dl", { class: "processes" }, environments.map(line)), file, wrong));
    }
    if (way !== "new") origin = await get(runPath(name, "origin"));
    say(title, verb + origin.name);
    const { config, differs = {}, warnings = [] } = await select({});
    say(said, [...Object.entries(differs).map(([one, [there, here]]) => `${one} is ${told(here)} here, and was ${told(there)} in that run.`), ...warnings].join(" "));
    const { configurable_fields: free, locked_fields: locked } = await tool("settings");
    rows = [...free, ...locked].filter((one) => one.same_as === undefined).map(settingRow);
    const first = ["name", ...Object.keys(config)].map((one) => rows.find((row) => row.name === one)).filter(Boolean);
    fill(more, h("summary", null, "All other settings"), rows.filter((row) => !first.includes(row)).map((row) => row.element));
    fill(fields, first.map((row) => row.element), more);
    rows.forEach((row) => row.take(TYPED.get(kept)?.[row.name]));
    form.hidden = false;
    typed();
  }

  function typed() {
    [checked, start.disabled] = [null, true]; // what was checked is no longer what would be started
    if (!busy && verdict.hasChildNodes()) say(verdict, CHANGED);
    TYPED.set(kept, edited());
    rows.forEach((row) => row.element.classList.toggle("changed", row.isChanged()));
    fill(changes, rows.filter((row) => row.isChanged()).map((row) => h("li", null, h("b", null, row.name), ` ${row.opened} → ${row.control.value}`)));
  }

  async function send(event) {
    event.preventDefault();
    if (busy) return;
    const [isStart, asked] = [event.submitter === start, JSON.stringify(edited())];
    busy = start.disabled = true;
    complain([]);
    say(verdict, isStart ? "Starting …" : "Checking; where the engine's speed is not known, it is measured …");
    try {
      if (isStart) {
        const { run_id: id } = await run({ checked, idempotency_key: `page-${draft}-${checked}` });
        TYPED.delete(kept);
        return closed || (location.hash = `#/runs/${encodeURIComponent(id)}`);
      }
      if (way !== "resume") await select(edited());
      const found = await run({ dry_run: true });
      const rule = found.checks.find((one) => one.problem)?.problem;
      if (judged(asked, [{ field: found.field, rule }], planned(found))) [checked, start.disabled] = [found.plan, !found.ok];
    } catch ({ message, body = {} }) {
      const next = body.code === "plan_changed" ? "Check it again." : body.next;
      judged(asked, body.problems ?? [{ field: body.field, rule: message }], h("p", { class: "problem", role: "alert" }, message), body.problems ? null : h("p", null, next));
    }
    busy = false;
  }

  // What was said of these settings, unless they are others by now.
  function judged(asked, problems, ...words) {
    const holds = asked === JSON.stringify(edited());
    fill(verdict, holds ? words : CHANGED);
    if (holds) complain(problems);
    return holds;
  }

  function complain(problems) {
    for (const { name: short, key, control, problem } of [...rows].reverse()) {
      const rule = problems.find(({ field }) => field === short || field === key)?.rule ?? "";
      say(problem, rule);
      control.setAttribute("aria-invalid", rule !== "");
      more.open ||= rule !== "" && more.contains(control);
      if (rule) control.focus(); // the first at last
    }
  }

  open().catch(({ message, body }) => say(said, [message, body?.next].filter(Boolean).join(" ")));
  return { element, changed() {}, close: () => (closed = true) };
}

function settingRow({ name, section, type, allowed, current_value: now, ...one }) {
  const choices = /^bool/.test(type) ? [true, false] : /^str( \| None)?$/.test(type) ? allowed : undefined;
  const options = choices && [...choices, ...(type.endsWith("None") ? [null] : [])].map((value) => h("option", null, told(value)));
  const control = h(options ? "select" : /\n|.{40}/.test(told(now)) ? "textarea" : "input", { disabled: "locked_value" in one, "aria-label": name, "aria-describedby": `problem-${section}-${name} quiet-${section}-${name}`, autocomplete: "off" }, options);
  const [problem, about] = ["problem", "quiet"].map((kind) => h("span", { class: kind, id: `${kind}-${section}-${name}` }));
  about.textContent = [one.why ? `Locked: ${one.why}` : "", one.description, type, one.range].filter(Boolean).join(" · ");
  const element = h("label", null, h("span", null, name), control, about, problem);
  control.value = told(now);
  const opened = control.value; // as the control has it: line ends are its own
  const take = (value = opened) => {
    if (!control.disabled) control.value = value;
    if (control.value !== value) control.value = opened; // it is offered no more
  };
  return { take, name, key: `${section}.${name}`, opened, control, problem, element, isChanged: () => control.value !== opened };
}

function planned({ ok, message, estimate, checks, warnings = [], next }) {
  const { step_s: step, total_min: total, peak_gb: peak, basis } = estimate ?? {};
  const takes = estimate && `Takes ${between(total)}, a step ${between(step.map((s) => s / 60))}, memory up to ${peak ?? "–"} GB. Estimated from ${basis}.`;
  const lines = [message, takes, ...warnings.map((one) => `⚠ ${one}`), ok ? null : next].filter(Boolean);
  const facts = (found) => Object.entries(found).filter(([, fact]) => fact !== "").map(([name, fact]) => h("div", null, `${name}: ${told(fact)}`));
  const row = ({ check, ok: holds, ...found }) => [h("dt", null, `${holds ? "✓" : found.problem ? "✗" : "⚠"} ${check}`), h("dd", null, facts(found))];
  return [h("p", { class: ok ? "score good" : "score bad" }, ok ? "Ready to start." : "The run cannot start."), lines.map((line) => h("p", null, line)), h("h3", null, "Checks"), h("dl", { class: "processes" }, checks.map(row))];
}
