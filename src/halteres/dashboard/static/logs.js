// The end of a process's log. Owns: whose it is, a filter, following it while the run goes on. Never: reads all of it.

import { get, runPath } from "./api.js";
import { fill, h, say } from "./dom.js";
import { latest } from "./latest.js";

const LINES = 40;
const EVERY_MS = 3000;

export function logs(id) {
  const role = h("select", { on: { change: () => asking.run() } });
  const grep = h("input", { type: "search", placeholder: "only lines with …", "aria-label": "Only lines with", on: { input: () => asking.run() } });
  const said = h("p", { class: "quiet", role: "status" });
  const text = h("pre", { class: "log", tabindex: 0, "aria-label": "Log" });
  const element = h("section", null, h("h2", null, "Log"), h("div", { class: "controls" }, h("label", { class: "quiet", hidden: true }, "Process ", role), grep), said, text);
  let ended = false;
  let begun = false;

  const asking = latest(async () => {
    try {
      show(await get(runPath(id, "logs"), { role: role.value, grep: grep.value, lines: LINES }));
    } catch (error) {
      say(said, error.message);
    }
  });

  function show({ roles, role: whose, lines, matched }) {
    if (role.options.length !== roles.length) fill(role, roles.map((one) => h("option", { value: one }, one)));
    role.value = whose;
    role.parentNode.hidden = false;
    say(said, lines.length ? "" : matched === undefined ? `${whose} has written nothing.` : "No line fits.");
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
    say(text, lines.join("\n"));
    if (atEnd) text.scrollTop = text.scrollHeight;
  }

  const following = setInterval(() => {
    if (!ended && !document.hidden && begun) asking.run();
  }, EVERY_MS);

  return {
    element,
    show({ terminal, logs: written }) {
      if (written.length === 0) return say(said, "Nothing is written yet.");
      if (!begun || terminal !== ended) asking.run();
      [begun, ended] = [true, terminal];
    },
    close() {
      clearInterval(following);
      asking.close();
    },
  };
}
