// Chat: one question to two policies of a run, their answers side by side as they come.
// Owns: the conversation, which ends with the view; one request for each column. Never: puts a question into words.

import { Refused, get, lines, runPath } from "./api.js";
import { fill, h, say } from "./dom.js";

const sentence = (error) => [error.message, error.body?.next].filter(Boolean).join(" ");

export function chatView(id) {
  const said = h("p", { class: "quiet", role: "status" }, "Reading the run …");
  const title = h("h1", null, "Chat");
  const models = ["Left model", "Right model"].map((label) => h("select", { "aria-label": label, title: label }));
  const log = h("div", { role: "log", "aria-label": "Conversation" });
  const text = h("textarea", { rows: 2, required: true, "aria-label": "Question", title: "Enter asks, Shift+Enter begins a line", on: { keydown: (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && ask(event) } });
  const [heat, most, history] = [["number", 0, "any"], ["number", 1], ["checkbox"]].map(([type, min, step]) => h("input", { type, min, step, required: type === "number" }));
  const send = h("button", { type: "submit", class: "button" }, "Ask");
  const stop = h("button", { type: "button", disabled: true, on: { click: () => asking.abort() } }, "Stop");
  const clear = h("button", { type: "button", on: { click: () => { asking?.abort(); fill(log, (turns = [])); } } }, "Clear");
  const switches = [["Temperature ", heat], ["Longest answer, tokens ", most], [history, " Send earlier questions and answers, too"]];
  const form = h("form", { class: "ask", on: { submit: ask } }, text, h("div", { class: "controls" }, send, stop, clear, switches.map((parts) => h("label", null, parts))));
  const body = h("section");
  let turns = []; // { question, answers: of each column its text; empty where it failed }
  let asking = null; // what stops the answers under way

  function show(found) {
    say(title, `Chat with ${found.run}`);
    say(said, found.service);
    offer(found);
    [text.placeholder, heat.value, most.value, history.checked] = [found.example, found.temperature, found.max_tokens, found.history];
    fill(body, h("div", { class: "pair" }, models), log, form, h("details", null, h("summary", null, "Prompt template"), h("pre", { class: "prompt", tabindex: 0 }, found.words)));
    text.focus();
  }

  function offer({ policies }) {
    models.forEach((model, at) => {
      const chosen = policies.find(({ name }) => name === model.value) ?? policies[at];
      fill(model, policies.map(({ name, label }) => h("option", { value: name, selected: name === chosen?.name }, label)));
    });
    models[1].hidden = policies.length === 1; // there is its base model alone
  }

  async function ask(event) {
    event.preventDefault();
    if (asking || !form.reportValidity()) return;
    asking = new AbortController();
    stop.disabled = !(send.disabled = true);
    const columns = models.filter((model) => !model.hidden).map(() => answer());
    const turn = { question: text.value, answers: [] };
    log.append(h("section", { class: "turn" }, h("h3", null, turn.question), h("div", { class: "pair" }, columns.map((one) => one.element))));
    [text.value, said.textContent] = ["", ""];
    form.scrollIntoView({ block: "nearest" });
    turn.answers = await Promise.all(columns.map((one, at) => {
      const before = turns.filter(({ answers }) => history.checked && answers[at]).map(({ question, answers }) => ({ question, answer: answers[at] }));
      const wanted = { policy: models[at].value, question: turn.question, temperature: heat.valueAsNumber, max_tokens: most.valueAsNumber, turns: before };
      return one.read(lines(runPath(id, "chat"), wanted, asking.signal));
    }));
    turns.push(turn);
    send.disabled = !(stop.disabled = true);
    asking = null;
    get(runPath(id, "chat")).then(offer, () => {}); // a run that goes on has newer ones
    if (document.activeElement === document.body) text.focus(); // a button that is disabled has lost it
  }

  get(runPath(id, "chat")).then(show, (error) => say(said, sentence(error)));
  const back = h("p", { class: "back" }, h("a", { href: `#/runs/${encodeURIComponent(id)}` }, "← The run"));
  return { element: h("article", null, back, title, said, body), changed: () => {}, close: () => asking?.abort() };
}

// One answer; `read` fills it with its lines, and gives its text where it is whole.
function answer() {
  const about = h("p", { class: "quiet" }, "…");
  const pre = h("pre", { class: "completion", tabindex: 0, "aria-label": "Answer" });
  return { element: h("div", null, about, pre), read };

  async function read(all) {
    try {
      for await (const line of all) {
        if (line.error) throw new Refused(line);
        if (line.about) say(about, line.about);
        pre.append(line.text ?? "");
      }
      return pre.textContent;
    } catch (error) {
      pre.after(h("p", { class: "alerted" }, error.name === "AbortError" ? "Stopped." : sentence(error)));
      return "";
    }
  }
}
