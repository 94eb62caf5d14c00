// What the run's processes take of the machine. Owns: which of them have a line of their own.
// Never: measures; the run's supervisor does.

import { get, runPath } from "./api.js";
import { board, chartControls } from "./controls.js";
import { fill, h } from "./dom.js";
import { AXES } from "./scale.js";

const MOST = 5; // processes with lines of their own; the others share one
const MACHINE = 7; // colour of what everything on the machine takes

export function usage(id) {
  const controls = chartControls(draw);
  const charts = h("div", { class: "charts" });
  const said = h("p", { class: "quiet" });
  const element = h("section", { class: "usage", hidden: true }, h("h2", null, "The machine"), controls.element, charts, said);
  const drawn = board(charts, controls);
  let last = null;

  function draw() {
    if (last === null) return;
    const { seconds, gpus, machine } = last;
    controls.reach(0, Math.max(1, seconds.at(-1)));
    const line = (label, colour, values) => ({ kind: "line", label, colour, xs: seconds, values });
    const spec = (title, series, share = false) => ({ title, share, zero: true, data: { series, axis: AXES.time } });
    const ofGpu = (gpu) => {
      const held = gpu.own.some((value) => value !== null) ? [line("the run's", 1, gpu.own)] : [];
      return [spec(`GPU ${gpu.index}, share of the time it computes`, [line("busy", 0, gpu.busy)], true), spec(`GPU ${gpu.index}, GB of ${gpu.total}`, [line("in use", 0, gpu.memory), ...held])];
    };
    drawn.show([
      spec("CPU, cores", [...largest(last.cpu).map(([role, values], at) => line(role, at, values)), line("all of the machine", MACHINE, machine.busy)]),
      spec("Memory, GB", largest(last.memory).map(([role, values], at) => line(role, at, values))),
      ...gpus.flatMap(ofGpu),
    ]);
    const cores = machine.cores ? `The machine has ${machine.cores} cores. ` : "";
    fill(said, `${cores}Memory is what is resident; what processes share counts for each.`);
  }

  return {
    element,
    async show() {
      last = await get(runPath(id, "usage")).catch(() => last); // at the next change again
      element.hidden = !(last?.seconds.length >= 2);
      if (!element.hidden) draw();
    },
    close: drawn.close,
  };
}

// Columns by process, those first that took most; the rest as one.
function largest(columns) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const known = Object.entries(columns).map(([role, values]) => [role, values.map((value) => value ?? 0)]); // not there: takes nothing
  const sorted = known.sort(([, one], [, other]) => total(other) - total(one));
  if (sorted.length <= MOST + 1) return sorted;
  const others = sorted.slice(MOST).map(([, values]) => values);
  const sum = others[0].map((_, at) => others.reduce((so, values) => so + values[at], 0));
  return [...sorted.slice(0, MOST), ["the rest", sum]];
}
