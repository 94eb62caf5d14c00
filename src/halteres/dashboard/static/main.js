// The page. Owns: which view the address names, and handing it the news. Never: draws anything itself.

import { compareView } from "./compare.js";
import { say } from "./dom.js";
import { listView } from "./list.js";
import { live } from "./live.js";
import { runView } from "./run.js";
import { trainingView } from "./training.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;

// What the address names: a run, runs to be compared, a training run, or none of them.
function named() {
  const [, what, name] = /^#\/(runs|compare|training)\/([^/]+)/.exec(location.hash) ?? [];
  try {
    return [what, name === undefined ? "" : decodeURIComponent(name)];
  } catch {
    return [what, name];
  }
}

function show() {
  if (location.hash.startsWith("#token=")) history.replaceState(null, "", "/");
  const [what, name] = named();
  view?.close();
  if (what === "runs") view = runView(name);
  else if (what === "compare") view = compareView(name.split(","));
  else if (what === "training") view = trainingView(name);
  else view = listView();
  document.title = what === undefined ? "Halteres" : `${name} · Halteres`;
  main.replaceChildren(view.element);
  scrollTo(0, 0);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});
addEventListener("hashchange", show);
show();
live(
  (ids) => view.changed(ids),
  (yes) => {
    connection.className = yes ? "up" : "down";
    say(connection, yes ? "live" : "No connection. If the server has ended: halteres ui");
  },
);
