// SPDX-License-Identifier: Apache-2.0
// A chart as a file: SVG and PNG as seen, CSV with every digit received. For heat maps these are seven (they are sent
// as float32): a count over 16 million is rounded there; /api/runs/RUN/records has it exactly. Nothing leaves the
// browser.

import { h, s } from "../dom.js";
import { theme } from "../colour.js";
import { place } from "../place.js";
import { canvasPen, svgPen, textWidth } from "./pen.js";

const HEAD = 32; // pixels above the chart for its title
const LINE = 16; // and for each line under it
const SCALE = 2;
const KEPT_MS = 10_000; // until the browser has certainly begun to write the file

export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = h("a", { href: address, download: name, hidden: true });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(address), KEPT_MS);
}

/** A file name from the title: letters and digits of any script, nothing that could form a path. */
export function fileName(title, ending) {
  const plain = String(title ?? "").normalize("NFKC").toLowerCase();
  const stem = plain.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80);
  return `${stem || "chart"}.${ending}`;
}

/** What the page shows around the plot and a file alone would lack: run, rounds, the note. */
function aroundIt({ options: { axis }, dom, chart }) {
  const rounds = axis && !axis.continuous && !chart.labelled?.() ? `rounds ${axis.view[0]} to ${axis.view[1]}` : "";
  return [place.run, rounds, dom.note.textContent].filter(Boolean).join(" · ");
}

/** Text in lines of at most that many pixels. */
function wrapped(text, room) {
  const lines = [];
  for (const word of text.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && textWidth(longer) <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.slice(0, 6);
}

/** The colour key, as positions along lines: [{x, row, strip | colour, text}]. */
function keyOf(frame, room) {
  const { entries = [], strip, from, to } = frame.dom.extra.painted ?? {};
  if (strip) return [{ x: 12, row: 0, strip, from, text: to }];
  let [x, row] = [12, 0];
  return entries.map(({ name, colour }) => {
    const wide = Math.min(220, textWidth(name)) + 32;
    if (x > 12 && x + wide > room) [x, row] = [12, row + 1];
    const here = { x, row, colour, text: name };
    x += wide;
    return here;
  });
}

function headOf(frame) {
  const room = frame.box.width - 24;
  const words = wrapped(aroundIt(frame), room);
  const key = keyOf(frame, room);
  const rows = key.length ? key.at(-1).row + 1 : 0;
  return { words, key, height: HEAD + LINE * (words.length + rows) + (words.length + rows ? 6 : 0) };
}

function paintHead(pen, frame, { words, key }) {
  const { ink, ink2 } = theme();
  const said = frame.unit ? `${frame.title} (${frame.unit})` : frame.title;
  pen.text(12, 20, said, { fill: ink, size: 13, weight: 600, room: frame.box.width - 24 });
  words.forEach((line, at) => pen.text(12, 36 + LINE * at, line, { fill: ink2, room: frame.box.width - 24 }));
  for (const { x, row, strip, from, colour, text } of key) {
    const y = 36 + LINE * (words.length + row);
    if (!strip) {
      pen.rect(x, y - 8, 8, 8, { fill: colour });
      pen.text(x + 13, y, text, { fill: ink, room: 220 });
      continue;
    }
    const start = x + textWidth(from) + 8;
    pen.text(x, y, from, { fill: ink });
    pen.image(strip, start, y - 8, 120, 8);
    pen.text(start + 128, y, text, { fill: ink });
  }
}

/** What is painted, and how far down: the chart, then its foot if it has one. */
function layers(frame, down) {
  const { chart, box } = frame;
  const still = { ...box, live: false };
  const found = [[down, (pen) => chart.paint(pen, still)]];
  if (chart.paintFoot) found.push([down + box.height, (pen) => chart.paintFoot(pen, still)]);
  return found;
}

const heightOf = (frame, head) => head.height + frame.box.height + frame.footHeight + 8;

/** Named after the run, the page and the plot, so that files of two runs do not clash. */
const nameOf = (frame, ending) => fileName([place.run, place.page, frame.title].filter(Boolean).join(" "), ending);

/** The chart as a self-contained SVG element. */
export function asSvg(frame) {
  const head = headOf(frame);
  const [width, height] = [frame.box.width, heightOf(frame, head)];
  const root = s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  root.append(s("rect", { width, height, fill: theme().paper }));
  paintHead(svgPen(root), frame, head);
  for (const [down, paint] of layers(frame, head.height)) {
    const group = s("g", { transform: `translate(0 ${down})` });
    root.append(group);
    paint(svgPen(group));
  }
  return root;
}

export function saveSvg(frame) {
  const text = new XMLSerializer().serializeToString(asSvg(frame));
  save(new Blob([text], { type: "image/svg+xml" }), nameOf(frame, "svg"));
}

export function savePng(frame) {
  const head = headOf(frame);
  const [width, height] = [frame.box.width, heightOf(frame, head)];
  const canvas = h("canvas", { width: Math.round(width * SCALE), height: Math.round(height * SCALE) });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = theme().paper;
  context.fillRect(0, 0, width, height);
  paintHead(canvasPen(context), frame, head);
  for (const [down, paint] of layers(frame, head.height)) {
    context.save();
    context.translate(0, down);
    paint(canvasPen(context));
    context.restore();
  }
  canvas.toBlob((blob) => blob && save(blob, nameOf(frame, "png")), "image/png");
}

/** One cell: numbers with every digit; names quoted where necessary, and never read as a formula. */
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
  save(new Blob([csvText(frame.chart.csv())], { type: "text/csv;charset=utf-8" }), nameOf(frame, "csv"));
}

/** The shortest decimal that is this float32: what was sent, not its digits as a double. */
export function shortest32(value) {
  if (!Number.isFinite(value)) return value;
  for (let digits = 6; digits < 10; digits += 1) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return value;
}
