// The page. Owns: which view the address names, and handing it the news. Never: draws anything itself.

import { chatView } from "./chat.js";
import { compareView } from "./compare.js";
import { say } from "./dom.js";
import { listView } from "./list.js";
import { live } from "./live.js";
import { runView } from "./run.js";
import { startView } from "./start.js";
import { trainingView } from "./training.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;

// The views that an address names, with what stands behind its name. A new run may have nothing there.
const VIEWS = {
  runs: runView,
  chat: chatView,
  training: trainingView,
  compare: (names) => compareView(names.split(",")),
  again: (id) => startView("again", id),
  resume: (id) => startView("resume", id),
  new: (environment) => startView("new", environment),
};

function named() {
  const [, what, name] = /^#\/(\w+)\/([^/]*)/.exec(location.hash) ?? [];
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
  const isNamed = Object.hasOwn(VIEWS, what) && (name || what === "new");
  view = isNamed ? VIEWS[what](name) : listView();
  main.replaceChildren(view.element);
  scrollTo(0, 0);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});
// A view says in its heading what it shows, once it has read that.
new MutationObserver(() => (document.title = `${(main.querySelector("h1")?.textContent || named()[1]).trim()} · Halteres`)).observe(main, { subtree: true, childList: true, characterData: true });
addEventListener("hashchange", show);
show();
live(
  (ids) => view.changed(ids),
  (yes) => {
    connection.className = yes ? "up" : "down";
    say(connection, yes ? "live" : "No connection. If the server has ended: halteres ui");
  },
);
