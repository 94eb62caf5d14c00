// A chart: lines over an axis, evaluations with their margins, marks of alerts.
// Owns: drawing, and reading values off by pointer or arrow keys. Never: chooses what is shown (`curves.js`).

import { fill, h, svg } from "./dom.js";
import { figure } from "./format.js";
import { AXES, extent, linear, roundStep, tickLabel, ticks } from "./scale.js";
import { zoomable } from "./zoom.js";

const EDGE = { top: 12, right: 14, bottom: 24, left: 50 };
const CIRCLE = 6; // pixels that a point reaches beyond the axes
const DOT_PX = 9; // where points lie so far apart, each is drawn
let charts = 0;

// chart({ title, share, zero, zoom }).show({ series: [{ label, kind: "line" | "points", xs, values, margins?, aside? }], marks,
// last, axis?, range?, smoothing? }); zoom({ choose, by }): what is done with a stretch that was chosen
export function chart({ title, share = false, zero = false, height = 180, zoom = null }) {
  const number = ++charts;
  const plot = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title}: nothing yet` });
  const tip = h("div", { class: "tip", "aria-live": "polite", hidden: true });
  const legend = h("div", { class: "legend" });
  const element = h("figure", { class: "chart" }, h("figcaption", null, h("b", null, title), legend), plot, tip);
  let shown = { series: [], marks: [], last: 0, axis: AXES.step };
  let scene = null;
  let at = null; // the place that is read off

  function draw() {
    const width = plot.clientWidth;
    if (width === 0) return;
    scene = laidOut(shown, { width, height, share, zero, clip: `clip${number}` });
    fill(plot, drawn(shown, scene));
    point(at);
  }

  function point(place) {
    at = place;
    plot.querySelector(".cursor")?.remove();
    tip.hidden = place === null || !scene?.xs.length;
    if (tip.hidden) return;
    at = nearest(scene.xs, place);
    plot.firstChild.append(cursor(shown, scene, at));
    fill(tip, told(shown, at));
    const left = plot.offsetLeft + scene.x(at);
    tip.style.left = `${Math.max(0, Math.min(left + 12, plot.offsetLeft + plot.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${plot.offsetTop + EDGE.top}px`;
  }

  plot.addEventListener("pointermove", (event) => {
    if (scene?.xs.length) point(scene.back(event.clientX - plot.getBoundingClientRect().left));
  });
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !scene?.xs.length) return;
    event.preventDefault();
    const last = scene.xs.length - 1;
    const place = at === null ? last : scene.xs.indexOf(at) + moves[event.key];
    point(scene.xs[Math.max(0, Math.min(last, place))]);
  });
  if (zoom) zoomable(plot, { at: (pixels) => scene.back(pixels), chosen: zoom.choose, by: (factor) => zoom.by(factor, at) });
  const sized = new ResizeObserver(draw);
  sized.observe(plot);

  return {
    element,
    show(data) {
      shown = { axis: AXES.step, marks: [], last: 0, ...data };
      plot.setAttribute("aria-label", `${title}: ${summary(shown)}. Arrow keys read values off${zoom ? ", + and - zoom, 0 shows all" : ""}.`);
      element.classList.toggle("many", shown.series.length > 1);
      fill(legend, shown.series.map(key));
      draw();
    },
    close: () => sized.disconnect(),
  };
}

function laidOut({ series, last, range }, { width, height, share, zero, clip }) {
  const every = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const wide = range ?? [Math.min(0, every[0] ?? 0), Math.max(last, every.at(-1) ?? 1) || 1];
  const inside = (place) => place >= wide[0] && place <= wide[1];
  const values = series.flatMap((one) => one.values.flatMap((value, at) => {
    const margin = share ? 0 : one.margins?.[at] ?? 0;
    return value === null || !inside(one.xs[at]) ? [] : [value - margin, value + margin];
  }));
  const tall = extent(values, { share, zero });
  const across = [EDGE.left, width - EDGE.right];
  const y = linear(tall, [height - EDGE.bottom, EDGE.top]);
  return { width, height, xs: every.filter(inside), wide, tall, x: linear(wide, across), y, back: linear(across, wide), clip };
}

function drawn({ series, marks, axis, smoothing }, scene) {
  const { width, height, clip, wide } = scene;
  const frame = { x: EDGE.left - CIRCLE, y: 0, width: Math.max(0, width - EDGE.left - EDGE.right + 2 * CIRCLE), height: height - EDGE.bottom + CIRCLE };
  return svg(
    "svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    svg("clipPath", { id: clip }, svg("rect", frame)),
    axes(scene, axis),
    svg(
      "g", { "clip-path": `url(#${clip})` },
      marks.filter(({ step }) => step >= wide[0] && step <= wide[1]).map((mark) => alertMark(mark, scene)),
      series.map((one) => (one.kind === "points" ? points(one, scene) : line(one, scene, smoothing))),
    ),
    scene.xs.length === 0 ? svg("text", { x: width / 2, y: height / 2, class: "none" }, "nothing yet") : null,
  );
}

function axes({ width, height, wide, tall, x, y }, axis) {
  const up = ticks(...tall, Math.max(2, height / 45));
  const apart = up.length > 1 ? up[1] - up[0] : roundStep(tall[1] - tall[0]);
  return svg(
    "g", { class: "axes" },
    up.map((value) => [
      svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: EDGE.left - 7, y: y(value) + 4, class: "up" }, tickLabel(value, apart)),
    ]),
    axis.marks(...wide, Math.max(2, width / 90)).map(([at, label]) => svg("text", { x: x(at), y: height - 6, class: "across" }, label)),
  );
}

// Every point as it was measured; where it is smoothed a bold line over it.
function line({ values, xs, colour }, scene, smoothing = 10) {
  const window = Math.min(smoothing, Math.floor(values.length / 5));
  const each = svg("path", { d: path(xs, values, scene), class: `line c${colour} ${window >= 2 ? "faint" : ""}` });
  const sparse = scene.xs.length * DOT_PX <= scene.width;
  const dots = sparse ? values.map((value, at) => value === null ? null : svg("circle", { class: `dot c${colour}`, cx: scene.x(xs[at]).toFixed(1), cy: scene.y(value).toFixed(1), r: 1.8 })) : null;
  const smoothed = window < 2 ? null : svg("path", { d: path(xs, smooth(values, window), scene), class: `line c${colour}` });
  return svg("g", null, each, dots, smoothed);
}

function path(xs, values, { x, y }) {
  let drawing = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) return; // a step without a value is no gap: evaluations and steps are told apart by it
    drawing += `${pen}${x(xs[at]).toFixed(1)} ${y(value).toFixed(1)}`;
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

function points({ xs, values, margins, colour, aside = 0 }, scene) {
  const { x, y, tall } = scene;
  const inside = (value) => y(Math.max(tall[0], Math.min(tall[1], value)));
  return svg(
    "g", { class: `points c${colour}` },
    svg("path", { d: path(xs, values, scene), class: "joined" }),
    values.map((value, at) => value === null ? null : svg(
      "g", { transform: `translate(${(x(xs[at]) + aside).toFixed(1)} 0)` },
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

// The point of a series at a place; of runs, whose points lie apart, the last one up to there.
function pointAt(one, place) {
  const known = one.values.flatMap((value, at) => (value === null ? [] : [at]));
  const at = one.kind === "points" || !one.apart
    ? known.find((index) => one.xs[index] === place)
    : known.findLast((index) => one.xs[index] <= place && place <= one.xs[known.at(-1)]);
  return at ?? null;
}

function cursor({ series }, { x, y, height }, place) {
  const dots = series.map((one) => {
    const at = pointAt(one, place);
    return at === null ? null : svg("circle", { cx: x(one.xs[at]), cy: y(one.values[at]), r: 4, class: `c${one.colour}` });
  });
  return svg("g", { class: "cursor" }, svg("line", { x1: x(place), x2: x(place), y1: EDGE.top, y2: height - EDGE.bottom }), dots);
}

function told({ series, marks, axis }, place) {
  const rows = series.flatMap((one) => {
    const at = pointAt(one, place);
    if (at === null) return [];
    const margin = one.margins?.[at] ? ` ± ${figure(one.margins[at], 2)}` : "";
    return [h("div", null, h("i", { class: `swatch c${one.colour}` }), `${one.label} `, h("b", null, `${figure(one.values[at], 4)}${margin}`))];
  });
  const alerts = marks.filter((mark) => mark.step === place).map((mark) => h("div", { class: "alerted" }, `⚠ ${mark.rule}`));
  return [h("div", { class: "quiet" }, axis.words(place)), rows, alerts];
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

function nearest(xs, wanted) {
  return xs.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), xs[0]);
}
