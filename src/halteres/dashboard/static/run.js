// One run. Owns: which parts its page has, and when each asks again. Never: draws one of them.
// A run that stands still changes no file, and so there is no news of it: its page asks by itself.

import { get, runPath } from "./api.js";
import { curves } from "./curves.js";
import { fill, h, say } from "./dom.js";
import { setClock } from "./format.js";
import { heading } from "./heading.js";
import { latest } from "./latest.js";
import { logs } from "./logs.js";
import { results } from "./results.js";
import { rollouts } from "./rollouts.js";
import { settings } from "./settings.js";
import { timeline } from "./timeline.js";
import { troubles } from "./troubles.js";
import { usage } from "./usage.js";

const ASK_AGAIN_MS = 10000;

export function runView(asked) {
  const said = h("p", { class: "quiet", role: "status" }, "Reading the run …");
  const element = h("article", null, h("p", { class: "back" }, h("a", { href: "#/" }, "← All runs")), said);
  let page = null;
  let again = null;

  const asking = latest(async () => {
    clearTimeout(again);
    try {
      const view = await get(runPath(page?.id ?? asked));
      if (!view.terminal) again = setTimeout(asking.run, ASK_AGAIN_MS);
      setClock(view.now);
      page ??= opened(view.run_id, element);
      say(said, "");
      await page.show(view);
    } catch (error) {
      tellFailure(said, error, page);
    }
  });
  asking.run();

  return {
    element,
    changed(ids) {
      if (ids === null || ids.has(page?.id ?? asked)) asking.run();
    },
    close() {
      clearTimeout(again);
      asking.close();
      page?.close();
    },
  };
}

// The parts, once it is known which run this is.
function opened(id, element) {
  const parts = { heading: heading(id), troubles: troubles(), curves: curves(), results: results(id) };
  const below = { rollouts: rollouts(id), logs: logs(id), settings: settings(id), timeline: timeline(), usage: usage(id) };
  element.append(
    parts.heading.element, parts.troubles.element, parts.curves.element, parts.results.element,
    below.usage.element, below.rollouts.element,
    h("div", { class: "columns" }, h("div", null, below.logs.element, below.timeline.element), below.settings.element),
  );
  let last = null;
  const draw = async () => {
    const metrics = await drawMetrics(parts.curves, runPath(id), last);
    parts.heading.held(metrics.evaluations);
    parts.results.evaluated(metrics.evaluations.step.length, last);
  };
  parts.curves.element.addEventListener("wanted", draw);
  return {
    id,
    async show(view) {
      last = view;
      for (const part of [parts.heading, parts.troubles, ...Object.values(below)]) part.show(view);
      await draw();
    },
    close: () => [...Object.values(parts), ...Object.values(below)].forEach((part) => part.close?.()),
  };
}

// The curves of what has its metrics at `path`; returns all steps', as points that are means where there are many.
export async function drawMetrics(curves, path, view) {
  const names = curves.names().join(",");
  const metrics = await get(`${path}/metrics`, { names });
  const [first, end] = (metrics.each > 1 && curves.within()) || [];
  const part = first === undefined ? metrics : await get(`${path}/metrics`, { names, first, last: end });
  curves.show(metrics, view, part);
  return metrics;
}

// A run that is not there; or a server that is not, while what was told last stays.
function tellFailure(said, error, page) {
  if (page) return say(said, error.message);
  const guess = error.body?.did_you_mean;
  fill(said, error.message, " ", guess ? h("a", { href: `#/runs/${encodeURIComponent(guess)}` }, `Open ${guess}`) : null);
}
