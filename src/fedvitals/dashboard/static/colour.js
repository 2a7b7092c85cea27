// SPDX-License-Identifier: Apache-2.0
// Colours, each with one meaning: series (Okabe–Ito), magnitude (cividis), sign (blue to orange through the paper),
// severity with its shape, parts of a round. All follow the theme; the theme itself is read from CSS. The colours
// themselves are in fedvitals/palette.py, which writes palette.js.

import { CIVIDIS, PARTS, SERIES, SHAPES, SIGNED, THEMES } from "./palette.js";

export { SHAPES };
const RANK = { note: 1, warning: 2, critical: 3 };

let known = null;
const listeners = new Set();
let watching = false;

/** [r, g, b] of any CSS colour that the browser itself would write as hex or rgb(). */
export function rgb(colour) {
  const text = colour.trim();
  if (text.startsWith("#")) {
    const hex = text.length < 6 ? [...text.slice(1, 4)].map((one) => one + one).join("") : text.slice(1, 7);
    return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }
  return (text.match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number);
}

export function luminance(colour) {
  const [r, g, b] = rgb(colour).map((byte) => {
    const share = byte / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

export function contrast(one, other) {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

export function mix(one, other, share) {
  const [from, to] = [rgb(one), rgb(other)];
  return "#" + from.map((byte, at) => Math.round(byte + (to[at] - byte) * share).toString(16).padStart(2, "0")).join("");
}

/** The colour, moved towards the ink until text in it is readable (AA, 4.5:1). */
export function readable(colour, colours = theme()) {
  const key = `${colour}`;
  if (!colours.readable.has(key)) {
    let found = colour;
    for (let share = 0; share <= 1 && contrast(found, colours.paper) < 4.5; share += 0.1) {
      found = mix(colour, colours.ink, share);
    }
    colours.readable.set(key, found);
  }
  return colours.readable.get(key);
}

/** The custom properties of the page as literal colours; read once, and again when the theme changes. */
export function theme() {
  if (known) return known;
  watch();
  const style = getComputedStyle(document.documentElement);
  const paper = style.getPropertyValue("--paper").trim();
  const dark = paper ? luminance(resolved(paper)) < 0.2 : darkWanted();
  const given = THEMES[dark ? "dark" : "light"];
  const found = { dark, readable: new Map() };
  for (const [name, other] of Object.entries(given)) {
    const value = style.getPropertyValue(`--${name}`).trim();
    found[name.replace("-2", "2")] = value ? resolved(value) : other;
  }
  known = found;
  return known;
}

// A property may be written as oklch(), color-mix() or light-dark(): a canvas returns what a canvas can use.
function resolved(value) {
  if (/^#[0-9a-f]{3,8}$/i.test(value)) return value;
  const probe = document.createElement("span");
  probe.style.color = value;
  document.documentElement.append(probe);
  const computed = getComputedStyle(probe).color;
  probe.remove();
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  context.fillStyle = computed;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return "#" + [r, g, b].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function darkWanted() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "dark" || chosen === "light") return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function watch() {
  if (watching) return;
  watching = true;
  const changed = () => {
    known = null;
    tables.clear();
    for (const listener of [...listeners]) listener();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const seen = new MutationObserver(changed);
  seen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
}

/** Calls back when the theme changes; returns a function that ends that. */
export function onTheme(listener) {
  watch();
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The n-th of eight colours of lines. */
export function seriesColour(index, colours = theme()) {
  const eight = SERIES[colours.dark ? "dark" : "light"];
  return eight[((index % 8) + 8) % 8];
}

/** For text and lines; `severityFill` for areas, which must be outlined in this one to be visible to all. */
export function severityColour(severity, colours = theme()) {
  return Object.hasOwn(SHAPES, severity) || severity === "ok" ? colours[severity] : colours.ink2;
}

export function severityFill(severity, colours = theme()) {
  return Object.hasOwn(SHAPES, severity) || severity === "ok" ? colours[`${severity}-fill`] : colours.ink2;
}

export function severityRank(severity) {
  return RANK[severity] ?? 0;
}

/** For a part of a round; unknown ones are grey. */
export function partColour(name, colours = theme()) {
  const parts = PARTS[colours.dark ? "dark" : "light"];
  return Object.hasOwn(parts, name) ? parts[name] : parts.unaccounted;
}

const tables = new Map();

/** 256 colours, as [r, g, b, …]: "even" is cividis, "signed" has zero in its middle. */
export function colourTable(kind = "even", colours = theme()) {
  const key = `${kind}:${colours.dark}`;
  if (!tables.has(key)) {
    const stops = kind === "signed" ? SIGNED[colours.dark ? "dark" : "light"] : CIVIDIS;
    tables.set(key, interpolated(stops.map(rgb)));
  }
  return tables.get(key);
}

function interpolated(stops) {
  const table = new Uint8ClampedArray(256 * 3);
  for (let at = 0; at < 256; at += 1) {
    const place = (at / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let band = 0; band < 3; band += 1) {
      table[at * 3 + band] = stops[low][band] + (stops[low + 1][band] - stops[low][band]) * (place - low);
    }
  }
  return table;
}

/** The colour at a position of a map, 0 to 1. */
export function mapColour(share, kind = "even", colours = theme()) {
  const table = colourTable(kind, colours);
  const at = Math.max(0, Math.min(255, Math.round(share * 255))) * 3;
  return `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
}
