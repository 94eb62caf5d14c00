// Charts that belong together, and the switches over them: smoothing, and the stretch of their axis that they show.
// Owns: both choices; which charts there are by now. Never: draws one (`chart.js`), or asks for figures.

import { chart } from "./chart.js";
import { h, offerOptions } from "./dom.js";

const WINDOWS = [[0, "none"], [5, "5 points"], [10, "10 points"], [25, "25 points"], [50, "50 points"]];
const DEFAULT = 10;

// changed(): a choice was made. Extra controls stand before the two.
export function chartControls(changed, ...extra) {
  const smooth = h("select", { "aria-label": "Smoothing", on: { change: changed } }, WINDOWS.map(([points, label]) => h("option", { value: points, selected: points === DEFAULT }, label)));
  const button = (label, text, act) => h("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
  const all = button("Show the whole axis", "All", () => choose(null));
  const zoom = h("span", { class: "group", role: "group", "aria-label": "Zoom" }, button("Zoom in", "+", () => by(0.5)), button("Zoom out", "−", () => by(2)), all);
  const element = h("div", { class: "controls" }, extra, h("label", { class: "quiet" }, "Smoothing ", smooth), zoom);
  let bounds = [0, 1]; // all that there is
  let range = null;
  choose(null, true);

  function choose(wanted, quiet = false) {
    range = wanted === null ? null : [Math.max(bounds[0], wanted[0]), Math.min(bounds[1], wanted[1])];
    if (range && (range[1] <= range[0] || (range[0] <= bounds[0] && range[1] >= bounds[1]))) range = null;
    all.disabled = range === null;
    if (!quiet) changed();
  }

  // Shows so many times as much, around `centre`, or the middle of what is shown.
  function by(factor, centre = null) {
    const [low, high] = range ?? bounds;
    const middle = centre ?? (low + high) / 2;
    choose([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }

  return {
    element,
    choose,
    by,
    forget: () => choose(null, true),
    within: () => range,
    smoothing: () => Number(smooth.value),
    reach(low, high) {
      bounds = [low, high];
    },
  };
}

// One more curve, by the name of its metric; offer(names): those that there are
export function curvePicker(chosen) {
  const picker = h("select", { "aria-label": "Add a curve", on: { change: () => chosen(picker.value) } });
  const element = h("label", { class: "quiet" }, "Another curve ", picker);
  function offer(names) {
    element.hidden = names.length === 0;
    offerOptions(picker, "…", names);
  }
  return { element, offer };
}

// show([{ title, data, … }]): a chart for each; those that are no longer among them are closed
export function board(into, controls) {
  const charts = new Map(); // title -> chart

  function drop([title, one]) {
    one.close();
    one.element.remove();
    charts.delete(title);
  }

  return {
    show(specs) {
      [...charts].filter(([known]) => !specs.some(({ title }) => title === known)).forEach(drop);
      for (const { data, ...spec } of specs) {
        if (!charts.has(spec.title)) charts.set(spec.title, chart({ ...spec, zoom: controls }));
        const one = charts.get(spec.title);
        if (one.element.parentNode !== into) into.append(one.element); // moved, it would lose the focus
        one.show({ ...data, range: controls.within(), smoothing: controls.smoothing() });
      }
    },
    close: () => charts.forEach((one) => one.close()),
  };
}
