// Tags and note of a run. Owns: showing and changing them, and what a writer has typed until it is saved.
// Never: takes the place of what another window has saved meanwhile.

import { post, runPath } from "./api.js";
import { fill, h, say } from "./dom.js";

// `acts`: whether they can be changed here
export function notes(id, { acts = true } = {}) {
  const tags = h("span", { class: "tags" });
  const note = h("p", { class: "own-note" });
  const edit = h("button", { type: "button", class: "copy", hidden: !acts, on: { click: open } }, "Tags and note");
  const names = h("input", { type: "text", "aria-label": "Tags, with commas between" });
  const text = h("textarea", { rows: 4, "aria-label": "Note" });
  const said = h("p", { class: "quiet", role: "status" });
  const save = h("button", { type: "submit" }, "Save");
  const cancel = h("button", { type: "button", on: { click: shut } }, "Cancel");
  const form = h(
    "form", { class: "notes-form", hidden: true, on: { submit: send, keydown: ({ key }) => key === "Escape" && shut() } },
    h("label", null, h("span", { class: "label" }, "Tags, with commas between"), names),
    h("label", null, h("span", { class: "label" }, "Note"), text), said, h("div", { class: "choices" }, save, cancel),
  );
  const element = h("div", { class: "notes" }, h("div", { class: "bar" }, tags, edit), note, form);
  let last = { tags: [], note: "", revision: 0 };
  let seen = null; // the revision that is being changed

  function open() {
    seen = last.revision;
    names.value = last.tags.join(", ");
    text.value = last.note;
    say(said, "");
    form.hidden = false;
    edit.hidden = true;
    names.focus();
  }

  function shut() {
    form.hidden = true;
    edit.hidden = false;
    edit.focus();
  }

  async function send(event) {
    event.preventDefault();
    save.disabled = true;
    try {
      const wanted = names.value.split(",").map((name) => name.trim()).filter(Boolean);
      show(await post(runPath(id, "notes"), { tags: wanted, note: text.value, revision: seen }));
      shut();
    } catch (error) {
      say(said, [error.message, error.body?.next].filter(Boolean).join(" ")); // what was typed stays
    }
    save.disabled = false;
  }

  function show(found) {
    last = found;
    fill(tags, found.tags.map((name) => h("span", { class: "tag" }, name)));
    say(note, found.error ?? found.note);
    edit.disabled = found.error !== undefined;
  }

  return { element, show };
}
