// SPDX-License-Identifier: Apache-2.0
// The address is the state: what a user sees can be shared, and the back button works.

import { addressOf } from "./root.js";

const heard = new Set();

export function onNavigate(listener) {
  heard.add(listener);
}

function tell(kind) {
  for (const listener of heard) listener(kind);
}

/** A link inside the page: link(runLink("x", "clients"), {sort: "name"}); null removes a parameter. */
export function link(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** A name as a segment of an address. What a path does not preserve is escaped twice: see run_address.py. */
function escaped(name, awkward) {
  return encodeURIComponent(awkward.test(name) ? `~${encodeURIComponent(name).replaceAll(".", "%2E")}` : name);
}

/** A run's id as a segment of an address. */
export function runPart(run) {
  return escaped(run, /^~|[/\\]|^\.\.?$/);
}

/** The name in a segment of an address that was decoded once. */
export function fromPart(part) {
  return part.startsWith("~") ? decodeURIComponent(part.slice(1)) : part;
}

/** The page of a run: runLink("id", "clients", "c7"), with every name escaped. */
export function runLink(run, ...parts) {
  return [addressOf("/runs"), runPart(run), ...parts.map((part) => escaped(part, /^~|^\.\.?$/))].join("/");
}

export function go(href) {
  if (href !== location.pathname + location.search) history.pushState(null, "", href);
  tell("page");
}

export const params = {
  get(name, otherwise = null) {
    return new URLSearchParams(location.search).get(name) ?? otherwise;
  },
  number(name, otherwise = null) {
    const text = this.get(name);
    return text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : otherwise;
  },
  list(name) {
    return (this.get(name) ?? "").split(",").filter(Boolean);
  },
  /** Change some; null removes. `push` adds a step for the back button; `quiet` does not reload. */
  set(changes, { push = false, quiet = false } = {}) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") query.delete(name);
      else query.set(name, value);
    }
    const text = query.toString();
    const href = location.pathname + (text ? `?${text}` : "");
    if (href === location.pathname + location.search) return;
    history[push ? "pushState" : "replaceState"](null, "", href);
    if (!quiet) tell("params");
  },
};

addEventListener("popstate", () => tell("page"));

document.addEventListener("click", (event) => {
  const anchor = event.target instanceof Element ? event.target.closest("a[href]") : null;
  if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const href = anchor.getAttribute("href") ?? anchor.getAttributeNS(null, "href");
  if (!href || !href.startsWith("/") || href.startsWith(addressOf("/api/")) || href.startsWith(addressOf("/static/"))) return;
  if (anchor.hasAttribute("download") || anchor.getAttribute("target")) return;
  event.preventDefault();
  go(href);
});
