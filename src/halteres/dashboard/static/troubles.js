// What is wrong with a run, and what to do. Owns: the failure and the alerts, each with its remedy. Never: applies one.

import { copyable, fill, h } from "./dom.js";

export function troubles() {
  const element = h("section", { "aria-label": "Alerts" });
  let told = "";

  return {
    element,
    show({ failure, alerts, next, status }) {
      const now = JSON.stringify([failure, alerts, next, status]);
      if (now === told) return; // what a reader has selected, or is about to copy, stays as it is
      told = now;
      fill(element, failure ? failed(failure, next) : null, alerts.map(alerted), status === "stopped" ? h("div", { class: "trouble" }, remedy("Next", next)) : null);
    },
  };
}

function failed({ error, code, exit, log_tail }, next) {
  const whose = exit ? `${exit.process ?? "a process"}, exit code ${exit.code ?? "unknown"}` : null;
  return h(
    "div", { class: "trouble failed", role: "alert" },
    h("h2", null, "This run has failed ", h("code", null, code)),
    h("p", null, error),
    whose ? h("p", { class: "quiet" }, whose) : null,
    remedy("Next", next),
    log_tail.length ? h("details", null, h("summary", null, "The end of its log"), h("pre", { tabindex: 0 }, log_tail.join("\n"))) : null,
  );
}

function alerted({ rule, step, times, evidence, remedy: call, current, over_at }) {
  return h(
    "div", { class: `trouble alert ${current ? "current" : ""}` },
    h("h2", null, `⚠ ${rule} `, h("span", { class: "quiet" }, `step ${step}${times > 1 ? `, ${times} times` : ""}${over_at === null ? "" : `, over at step ${over_at}`}`)),
    h("p", null, evidence),
    remedy("Remedy", call),
  );
}

// One line for each step: what it is for, and a command that can be pasted as it stands.
function remedy(label, lines) {
  return lines.map(({ words, command }, at) => h(
    "p", { class: "remedy" }, at === 0 ? h("span", { class: "label" }, label) : null,
    words ? h("span", null, command ? `${words} ` : words) : null, command ? copyable(command) : null,
  ));
}
