// What has happened, newest first; and the processes. Owns: how an event is put. Never: asks.

import { fill, h } from "./dom.js";
import { clock, moment } from "./format.js";

export function timeline() {
  const processes = h("dl", { class: "processes" });
  const list = h("ol", { class: "timeline" });
  const happened = h("h2", null, "What happened");
  const folder = h("p", { class: "quiet folder" });
  const element = h("section", null, h("h2", null, "Processes"), processes, happened, list, folder);

  return {
    element,
    show(view) {
      fill(processes, Object.entries(view.processes).map(([role, state]) => [h("dt", null, role), h("dd", null, state)]));
      happened.hidden = view.timeline.length === 0;
      fill(list, [...view.timeline].reverse().map(({ t, kind, text }) => h(
        "li", null, h("time", { title: t === null ? null : moment(t) }, t === null ? "" : clock(t)), h("span", { class: "kind" }, kind.replaceAll("_", " ")), h("span", null, text),
      )));
      fill(folder, "Everything of this run lies in ", h("code", null, view.folder));
    },
  };
}
