// Groups as a file of their own. Owns: what such a file has above its groups. Never: asks for anything.

import { h } from "./dom.js";
import { figure } from "./format.js";
import { groupList } from "./groups.js";

// data: see groups/page.py
export function view({ source, written, groups, facts }) {
  const list = listOf(groups);
  const entries = Object.entries(facts).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, figure(value))));
  const element = h("article", { class: "groups-file" }, h("h1", null, "Groups"), h("p", { class: "quiet" }, `${source} · written ${written}`), h("dl", { class: "facts" }, entries));
  if (groups.length) {
    element.append(h("section", { class: "rollouts" }, list.element));
  } else element.append(h("p", { class: "quiet" }, "No group has come yet."));
  return element;
}

// Of groups that are there whole.
export function listOf(groups) {
  const list = groupList({ open: async (group) => group, search: (text) => list.show(found(groups, text.toLowerCase())) });
  list.show(groups, { first: true });
  return list;
}

// The same groups, each with the numbers of its rollouts that have this text.
function found(groups, text) {
  if (!text) return groups;
  const texts = ({ parts = [] }) => parts.map((part) => part.text).join("\n");
  return groups.map((group) => {
    const has = (one) => one.toLowerCase().includes(text);
    return { ...group, found: group.rollouts.map((rollout, at) => at).filter((at) => has(`${group.prompt}\n${group.task}`) || has(texts(group.rollouts[at]))) };
  });
}
