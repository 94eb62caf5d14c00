// The page. Owns: which view the address names, and handing it the news. Never: draws anything itself.

import { say } from "./dom.js";
import { listView } from "./list.js";
import { live } from "./live.js";
import { runView } from "./run.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;

function named() {
  const found = /^#\/runs\/([^/]+)/.exec(location.hash);
  try {
    return found ? decodeURIComponent(found[1]) : null;
  } catch {
    return found[1];
  }
}

function show() {
  if (location.hash.startsWith("#token=")) history.replaceState(null, "", "/");
  const id = named();
  view?.close();
  view = id === null ? listView() : runView(id);
  document.title = id === null ? "Halteres" : `${id} · Halteres`;
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
