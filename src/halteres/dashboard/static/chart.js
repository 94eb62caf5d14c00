// A chart: lines over the steps, evaluations with their margins, marks of alerts.
// Owns: drawing, and reading values off by pointer or arrow keys. Never: chooses what is shown (`curves.js`).

import { fill, h, svg } from "./dom.js";
import { figure } from "./format.js";
import { extent, linear, roundStep, tickLabel, ticks } from "./scale.js";

const EDGE = { top: 12, right: 14, bottom: 24, left: 50 };
const SMOOTHED = 10; // points whose mean a bold line shows, of a curve five times as long

// chart({ title, share }).show({ series: [{ label, kind: "line" | "points", steps, values, margins?, aside? }], marks, last })
export function chart({ title, share = false, height = 180 }) {
  const plot = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title}: nothing yet` });
  const tip = h("div", { class: "tip", "aria-live": "polite", hidden: true });
  const legend = h("div", { class: "legend" });
  const element = h("figure", { class: "chart" }, h("figcaption", null, h("b", null, title), legend), plot, tip);
  let shown = { series: [], marks: [], last: 0 };
  let scene = null;
  let at = null; // the step that is read off

  function draw() {
    const width = plot.clientWidth;
    if (width === 0) return;
    scene = laidOut(shown, { width, height, share });
    fill(plot, drawn(shown, scene));
    point(at);
  }

  function point(step) {
    at = step;
    plot.querySelector(".cursor")?.remove();
    tip.hidden = step === null || !scene?.steps.length;
    if (tip.hidden) return;
    at = nearest(scene.steps, step);
    plot.firstChild.append(cursor(shown, scene, at));
    fill(tip, told(shown, at));
    const left = plot.offsetLeft + scene.x(at);
    tip.style.left = `${Math.max(0, Math.min(left + 12, plot.offsetLeft + plot.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${plot.offsetTop + EDGE.top}px`;
  }

  plot.addEventListener("pointermove", (event) => {
    if (scene?.steps.length) point(scene.stepAt(event.clientX - plot.getBoundingClientRect().left));
  });
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !scene?.steps.length) return;
    event.preventDefault();
    const last = scene.steps.length - 1;
    const place = at === null ? last : scene.steps.indexOf(at) + moves[event.key];
    point(scene.steps[Math.max(0, Math.min(last, place))]);
  });
  const sized = new ResizeObserver(draw);
  sized.observe(plot);

  return {
    element,
    show(data) {
      shown = data;
      plot.setAttribute("aria-label", `${title}: ${summary(data)}. Arrow keys read values off.`);
      fill(legend, data.series.map(key));
      draw();
    },
    close: () => sized.disconnect(),
  };
}

function laidOut({ series, last }, { width, height, share }) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const values = series.flatMap((one) => one.values.flatMap((value, at) => {
    const margin = one.margins?.[at] ?? 0;
    return value === null ? [] : [value - (share ? 0 : margin), value + (share ? 0 : margin)];
  }));
  const wide = [Math.min(0, steps[0] ?? 0), Math.max(last, steps.at(-1) ?? 1, 1)];
  const tall = extent(values, { share });
  const x = linear(wide, [EDGE.left, width - EDGE.right]);
  const y = linear(tall, [height - EDGE.bottom, EDGE.top]);
  const back = linear([EDGE.left, width - EDGE.right], wide);
  return { width, height, steps, wide, tall, x, y, stepAt: (place) => nearest(steps, back(place)) };
}

function drawn({ series, marks }, scene) {
  const { width, height } = scene;
  return svg(
    "svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    axes(scene),
    marks.map((mark) => alertMark(mark, scene)),
    series.map((one) => (one.kind === "points" ? points(one, scene) : line(one, scene))),
    scene.steps.length === 0 ? svg("text", { x: width / 2, y: height / 2, class: "none" }, "nothing yet") : null,
  );
}

function axes({ width, height, wide, tall, x, y }) {
  const across = ticks(...wide, Math.max(2, width / 90)).filter((step) => Number.isInteger(step));
  const up = ticks(...tall, Math.max(2, height / 45));
  const apart = up.length > 1 ? up[1] - up[0] : roundStep(tall[1] - tall[0]);
  return svg(
    "g", { class: "axes" },
    up.map((value) => [
      svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: EDGE.left - 7, y: y(value) + 4, class: "up" }, tickLabel(value, apart)),
    ]),
    across.map((step) => svg("text", { x: x(step), y: height - 6, class: "across" }, String(step))),
  );
}

function line({ values, steps, colour }, { x, y }) {
  const window = Math.min(SMOOTHED, Math.floor(values.length / 5));
  const each = svg("path", { d: path(steps, values, x, y), class: `line c${colour} ${window >= 2 ? "faint" : ""}` });
  if (window < 2) return each;
  return svg("g", null, each, svg("path", { d: path(steps, smooth(values, window), x, y), class: `line c${colour}` }));
}

function path(steps, values, x, y) {
  let drawing = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) return; // a step without a value is no gap: evaluations and steps are told apart by it
    drawing += `${pen}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return drawing.includes("L") ? drawing : `${drawing}h0.01`;
}

// The mean of each value and its neighbours on both sides: a mean of those before alone would lag behind.
function smooth(values, window) {
  const reach = Math.floor(window / 2);
  return values.map((value, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
    return value === null ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

function points({ steps, values, margins, colour, aside = 0 }, { x, y, tall }) {
  const inside = (value) => y(Math.max(tall[0], Math.min(tall[1], value)));
  return svg(
    "g", { class: `points c${colour}` },
    svg("path", { d: path(steps, values, x, y), class: "joined" }),
    values.map((value, at) => value === null ? null : svg(
      "g", { transform: `translate(${(x(steps[at]) + aside).toFixed(1)} 0)` },
      margins?.[at] ? bar(inside(value + margins[at]), inside(value - margins[at])) : null,
      svg("circle", { cy: y(value).toFixed(1), r: 4 }),
    )),
  );
}

function bar(top, bottom) {
  return svg("path", { class: "margin", d: `M-4 ${top}h8M0 ${top}V${bottom}M-4 ${bottom}h8` });
}

function alertMark({ rule, step }, { x, height }) {
  const place = x(step).toFixed(1);
  return svg(
    "g", { class: "mark" }, svg("title", null, `${rule} (step ${step})`),
    svg("line", { x1: place, x2: place, y1: EDGE.top, y2: height - EDGE.bottom }),
    svg("path", { d: `M${place} ${EDGE.top}l-5 -9h10z` }),
  );
}

function cursor({ series }, { x, y, height }, step) {
  const dots = series.map((one) => {
    const value = one.values[one.steps.indexOf(step)];
    return value === undefined || value === null ? null : svg("circle", { cx: x(step), cy: y(value), r: 4, class: `c${one.colour}` });
  });
  return svg("g", { class: "cursor" }, svg("line", { x1: x(step), x2: x(step), y1: EDGE.top, y2: height - EDGE.bottom }), dots);
}

function told({ series, marks }, step) {
  const rows = series.flatMap((one) => {
    const at = one.steps.indexOf(step);
    if (at < 0 || one.values[at] === null) return [];
    const margin = one.margins?.[at] ? ` ± ${figure(one.margins[at], 2)}` : "";
    return [h("div", null, h("i", { class: `swatch c${one.colour}` }), `${one.label} `, h("b", null, `${figure(one.values[at], 4)}${margin}`))];
  });
  const alerts = marks.filter((mark) => mark.step === step).map((mark) => h("div", { class: "alerted" }, `⚠ ${mark.rule}`));
  return [h("div", { class: "quiet" }, `step ${step}`), rows, alerts];
}

function key({ label, colour, kind }) {
  return h("span", { class: "key" }, h("i", { class: `swatch c${colour} ${kind}` }), label);
}

function summary({ series }) {
  const said = series.flatMap(({ label, values }) => {
    const known = values.filter((value) => value !== null);
    return known.length ? [`${label} ${figure(known[0])} to ${figure(known.at(-1))}`] : [];
  });
  return said.join(", ") || "nothing yet";
}

function nearest(steps, wanted) {
  return steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);
}
