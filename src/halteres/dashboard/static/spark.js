// A curve the size of a word. Owns: its shape. Never: has axes.

import { svg } from "./dom.js";

const [WIDTH, HEIGHT, EDGE] = [120, 30, 3]; // pixels

export function spark(values) {
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  if (values.length < 2) return drawing;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (at) => EDGE + (at * (WIDTH - 2 * EDGE)) / (values.length - 1);
  const y = (value) => HEIGHT - EDGE - ((value - low) / (high - low || 1)) * (HEIGHT - 2 * EDGE);
  const points = values.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
  const last = values.length - 1;
  drawing.append(
    svg("polyline", { points: points.join(" ") }),
    svg("circle", { cx: x(last).toFixed(1), cy: y(values[last]).toFixed(1), r: 2.4 }),
  );
  return drawing;
}
