// SPDX-License-Identifier: Apache-2.0
// A chart as a file: SVG and PNG as it is seen, CSV with every value as it was stored. Nothing leaves the browser.

import { h, s } from "../dom.js";
import { theme } from "../colour.js";
import { canvasPen, svgPen } from "./pen.js";

const HEAD = 32; // pixels above the chart for its title
const SCALE = 2;
const KEPT_MS = 10_000; // until the browser has surely begun to write the file

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = h("a", { href: address, download: name, hidden: true });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(address), KEPT_MS);
}

/** A file name of the title: letters and digits of any script, nothing that a path could be made of. */
export function fileName(title, ending) {
  const plain = String(title ?? "").normalize("NFKC").toLowerCase();
  const stem = plain.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80);
  return `${stem || "chart"}.${ending}`;
}

function paintHead(pen, frame) {
  const said = frame.unit ? `${frame.title} (${frame.unit})` : frame.title;
  pen.text(12, 20, said, { fill: theme().ink, size: 13, weight: 600, room: frame.box.width - 24 });
}

/** What is painted, and how far down: the chart, then its foot where it has one. */
function layers(frame) {
  const { chart, box } = frame;
  const still = { ...box, live: false };
  const found = [[HEAD, (pen) => chart.paint(pen, still)]];
  if (chart.paintFoot) found.push([HEAD + box.height, (pen) => chart.paintFoot(pen, still)]);
  return found;
}

const heightOf = (frame) => HEAD + frame.box.height + frame.footHeight + 8;

/** The chart as an SVG element that needs nothing but itself. */
export function asSvg(frame) {
  const [width, height] = [frame.box.width, heightOf(frame)];
  const root = s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  root.append(s("rect", { width, height, fill: theme().paper }));
  paintHead(svgPen(root), frame);
  for (const [down, paint] of layers(frame)) {
    const group = s("g", { transform: `translate(0 ${down})` });
    root.append(group);
    paint(svgPen(group));
  }
  return root;
}

export function saveSvg(frame) {
  const text = new XMLSerializer().serializeToString(asSvg(frame));
  save(new Blob([text], { type: "image/svg+xml" }), fileName(frame.title, "svg"));
}

export function savePng(frame) {
  const [width, height] = [frame.box.width, heightOf(frame)];
  const canvas = h("canvas", { width: Math.round(width * SCALE), height: Math.round(height * SCALE) });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = theme().paper;
  context.fillRect(0, 0, width, height);
  paintHead(canvasPen(context), frame);
  for (const [down, paint] of layers(frame)) {
    context.save();
    context.translate(0, down);
    paint(canvasPen(context));
    context.restore();
  }
  canvas.toBlob((blob) => blob && save(blob, fileName(frame.title, "png")), "image/png");
}

/** One cell: numbers with every digit; names quoted where they must be, and never read as a formula. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Object.is(value, -0) ? "0" : String(value);
  const text = String(value);
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Rows of cells as RFC 4180 text. */
export function csvText(rows) {
  let text = "";
  for (const row of rows) text += row.map(cell).join(",") + "\r\n";
  return text;
}

export function saveCsv(frame) {
  save(new Blob([csvText(frame.chart.csv())], { type: "text/csv;charset=utf-8" }), fileName(frame.title, "csv"));
}

/** The shortest decimal that is this float32: what was stored, not what it looks like as a double. */
export function shortest32(value) {
  if (!Number.isFinite(value)) return value;
  for (let digits = 6; digits < 10; digits += 1) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return value;
}
