// Elements. Owns: that every text becomes a text node, whatever it holds. Never: parses markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a", { href: "#/", class: "x", on: { click: f } }, "text", child, [children], null)
export function h(tag, props, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// Replaces the children of an element.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

// Sets a text, and touches nothing where it is the same: what a reader has selected stays selected.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function badge(status, phase) {
  const label = phase && status !== "failed" ? `${status}: ${phase}` : status;
  return h("span", { class: `badge ${/^[a-z]+$/.test(status) ? status : ""}` }, label);
}

export function copyable(text, label = "Copy") {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}` }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Press Ctrl-C";
    }
    setTimeout(() => (button.textContent = label), 1500);
  });
  const code = h("code", null, text);
  return h("span", { class: "copyable" }, code, button);
}

// Offers these names, once each, and what stands for all of them; what was chosen stays while it is among them.
export function offerOptions(select, all, names) {
  const found = [...new Set(names)].filter(Boolean);
  const offered = [...select.options].map(({ value }) => value).filter(Boolean);
  if (select.options.length && String(offered) === String(found)) return; // an open menu stays as it is
  const before = select.value;
  const made = found.map((name) => h("option", { value: name }, name));
  fill(select, all ? h("option", { value: "" }, all) : null, made);
  select.value = found.includes(before) ? before : (all ? "" : found[0]);
  select.hidden = all && !found.length;
}
