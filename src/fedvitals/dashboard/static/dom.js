// SPDX-License-Identifier: Apache-2.0
// Creates elements. Anything from a store is a text node: there is no way here to make HTML of a string.

const SVG = "http://www.w3.org/2000/svg";

function apply(node, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else if (name === "href" && !safe(value)) continue;
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/** Links lead within this page, or download what it created; never into a script. */
function safe(href) {
  if (!/^([/#?]|blob:)/.test(href)) return false;
  try {
    return href.startsWith("blob:") || new URL(href, location.href).origin === location.origin;
  } catch {
    return false;
  }
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** An element: h("a", {class: "x", href: "/", on: {click}}, "text", other). */
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  apply(node, props);
  return add(node, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  const node = document.createElementNS(SVG, tag);
  apply(node, props);
  return add(node, children);
}

/** Replaces the children. */
export function fill(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

/** Children by key: existing ones are updated in place, so that focus, scroll and selection survive. */
export function keyed(parent, items, key, make, update) {
  const before = (parent.keyedNodes ??= new Map());
  const now = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let node = before.get(name);
    if (node === undefined) node = make(item);
    if (update) update(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    now.set(name, node);
  }
  for (const [name, node] of before) if (now.get(name) !== node) node.remove();
  parent.keyedNodes = now;
}

/** A sentence as elements, with its `code` highlighted. */
export function words(text) {
  return String(text).split("`").map((part, i) => (i % 2 ? h("code", { text: part }) : part));
}

/** Announces text to screen readers. */
export function announce(text) {
  const node = document.getElementById("announcer");
  if (node) node.textContent = text;
}
