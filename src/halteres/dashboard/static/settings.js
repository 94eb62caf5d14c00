// The settings of a run. Owns: which are shown first: those that somebody set, and those that matter most.
// Never: changes one.

import { get, runPath } from "./api.js";
import { fill, h } from "./dom.js";

export function settings(id) {
  const table = h("table");
  const all = h("input", { type: "checkbox", on: { change: draw } });
  const element = h(
    "section", { hidden: true }, h("h2", null, "Settings"),
    h("label", { class: "quiet" }, all, " show all"), h("div", { class: "wide", tabindex: 0 }, table),
  );
  let known = null;

  function draw() {
    const shown = known.filter((one) => all.checked || one.set || one.headline);
    fill(
      table, h("thead", null, h("tr", null, ["setting", "value", "from"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, shown.map(({ name, value, source, set }) => h(
        "tr", { class: set ? "set" : null }, h("th", { scope: "row" }, name), h("td", null, told(value)), h("td", { class: "quiet" }, source),
      ))),
    );
  }

  return {
    element,
    async show() {
      if (known !== null) return;
      known = [];
      known = await get(runPath(id, "settings")).then((found) => found.settings, () => null); // at the next change again
      element.hidden = !known?.length;
      if (known) draw();
    },
  };
}

export function told(value) {
  if (typeof value === "number") return String(Number(value.toPrecision(12)));
  return typeof value === "string" ? value : JSON.stringify(value);
}
