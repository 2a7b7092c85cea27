// SPDX-License-Identifier: Apache-2.0
// One way to draw on two surfaces: an SVG (text stays text, links stay links) and a canvas (tens of thousands of
// marks). A chart uses one function for both, so the download matches what is seen.
//
// A style: {fill, stroke, width, dash, opacity}. Points of a path: flat numbers [x, y, x, y, …]; `rects` are
// [x, y, width, height, …], many in one stroke.

import { s } from "../dom.js";
import { shortId } from "../parts/who.js";

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const big = matchMedia("(min-width: 2200px)"); // where the page's own text grows as well
let SIZE = big.matches ? 13 : 11;
const KEPT = 4000;
// XML allows no control characters and no lone surrogates; a hostile name may contain them.
// eslint-disable-next-line no-control-regex
const UNWRITABLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

let ruler = null;
const widths = new Map();
big.addEventListener("change", () => {
  SIZE = big.matches ? 13 : 11;
});

/** A chart's text size in pixels. */
export const textSize = () => SIZE;

/** Width of a text in pixels. */
export function textWidth(text, size = SIZE, weight = 400) {
  const key = `${weight} ${size} ${text}`;
  let width = widths.get(key);
  if (width === undefined) {
    ruler ??= document.createElement("canvas").getContext("2d");
    ruler.font = `${weight} ${size}px ${FONT}`;
    width = ruler.measureText(text).width;
    if (widths.size > KEPT) widths.clear();
    widths.set(key, width);
  }
  return width;
}

/** The text, or as much of its two ends as fits: layer and client names usually differ at the end. */
export function fitted(text, room, size = SIZE, weight = 400) {
  const whole = String(text).slice(0, 300);
  if (textWidth(whole, size, weight) <= room) return whole;
  const id = shortId(whole);
  if (id !== whole && textWidth(id, size, weight) <= room) return id;
  const letters = [...whole];
  let [low, high] = [0, letters.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(shortened(letters, middle), size, weight) <= room) low = middle;
    else high = middle - 1;
  }
  return low < 2 ? "" : shortened(letters, low);
}

function shortened(letters, count) {
  const end = Math.ceil(count / 2);
  return letters.slice(0, count - end).join("") + "…" + letters.slice(letters.length - end).join("");
}

const round = (value) => Math.round(value * 100) / 100;

function pathOf(points, closed) {
  let text = "";
  for (let at = 0; at < points.length; at += 2) text += `${at ? "L" : "M"}${round(points[at])} ${round(points[at + 1])}`;
  return closed ? text + "Z" : text;
}

function painted({ fill = "none", stroke = "none", width = 1, dash, opacity }) {
  return {
    fill,
    stroke,
    "stroke-width": stroke === "none" ? null : width,
    "stroke-dasharray": dash ? dash.join(" ") : null,
    "stroke-linejoin": stroke === "none" ? null : "round",
    opacity: opacity === undefined || opacity === 1 ? null : opacity,
  };
}

let clips = 0;

/** Draws into an SVG element. */
export function svgPen(root) {
  let target = root;
  const put = (node) => {
    target.append(node);
    return node;
  };
  const pen = {
    rect: (x, y, width, height, style) =>
      put(s("rect", { x: round(x), y: round(y), width: round(Math.max(0, width)), height: round(Math.max(0, height)), ...painted(style) })),
    rects(flat, style) {
      let d = "";
      for (let at = 0; at < flat.length; at += 4) {
        const [x, y, width, height] = [flat[at], flat[at + 1], flat[at + 2], flat[at + 3]].map(round);
        d += `M${x} ${y}h${width}v${height}h${-width}Z`;
      }
      if (d) put(s("path", { d, ...painted(style) }));
    },
    line: (x1, y1, x2, y2, style) =>
      put(s("line", { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2), ...painted(style) })),
    disc: (x, y, radius, style) => put(s("circle", { cx: round(x), cy: round(y), r: radius, ...painted(style) })),
    path(pieces, style, closed = false) {
      const d = pieces.map((points) => pathOf(points, closed)).join("");
      if (d) put(s("path", { d, ...painted(style) }));
    },
    text(x, y, text, { fill, size = SIZE, anchor = "start", weight, turn, room, halo } = {}) {
      const said = room === undefined ? String(text) : fitted(text, room, size, weight);
      const node = s("text", {
        x: round(x), y: round(y), fill, "font-size": size, "font-weight": weight,
        "text-anchor": anchor === "start" ? null : anchor, "font-family": FONT,
        stroke: halo, "stroke-width": halo ? 3 : null, "stroke-linejoin": halo ? "round" : null, "paint-order": halo ? "stroke" : null,
        transform: turn ? `rotate(${turn} ${round(x)} ${round(y)})` : null,
      });
      node.textContent = said.replace(UNWRITABLE, "\ufffd");
      node.style.fontVariantNumeric = "tabular-nums";
      return put(node);
    },
    image(canvas, x, y, width, height) {
      const node = s("image", { x: round(x), y: round(y), width: round(width), height: round(height), preserveAspectRatio: "none" });
      node.setAttribute("href", canvas.toDataURL("image/png"));
      node.style.imageRendering = "pixelated";
      put(node);
    },
    clip(x, y, width, height, draw) {
      const id = `clip-${(clips += 1)}`;
      put(s("clipPath", { id }, s("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height) })));
      within(s("g", { "clip-path": `url(#${id})` }), draw);
    },
    link(href, draw) {
      // No tab stop: the same links are in the page's lists.
      within(href ? s("a", { href, tabindex: -1 }) : s("g"), draw);
    },
  };
  function within(group, draw) {
    const outer = target;
    put(group);
    target = group;
    draw(pen);
    target = outer;
  }
  return pen;
}

/** Draws into the 2-D context of a canvas, in CSS pixels. */
export function canvasPen(context) {
  const ink = ({ fill, stroke, width = 1, dash, opacity = 1 }, trace) => {
    context.globalAlpha = opacity;
    context.beginPath();
    trace();
    if (fill && fill !== "none") {
      context.fillStyle = fill;
      context.fill();
    }
    if (stroke && stroke !== "none") {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.lineJoin = "round";
      context.setLineDash(dash ?? []);
      context.stroke();
    }
    context.globalAlpha = 1;
  };
  const pen = {
    context,
    rect: (x, y, width, height, style) => ink(style, () => context.rect(x, y, Math.max(0, width), Math.max(0, height))),
    rects: (flat, style) =>
      ink(style, () => {
        for (let at = 0; at < flat.length; at += 4) context.rect(flat[at], flat[at + 1], flat[at + 2], flat[at + 3]);
      }),
    line: (x1, y1, x2, y2, style) =>
      ink(style, () => {
        context.moveTo(x1, y1);
        context.lineTo(x2, y2);
      }),
    disc: (x, y, radius, style) => ink(style, () => context.arc(x, y, radius, 0, 2 * Math.PI)),
    path: (pieces, style, closed = false) =>
      ink(style, () => {
        for (const points of pieces) {
          for (let at = 0; at < points.length; at += 2) context[at ? "lineTo" : "moveTo"](points[at], points[at + 1]);
          if (closed) context.closePath();
        }
      }),
    text(x, y, text, { fill, size = SIZE, anchor = "start", weight = 400, turn, room, halo } = {}) {
      const said = room === undefined ? String(text) : fitted(text, room, size, weight);
      context.save();
      context.font = `${weight} ${size}px ${FONT}`;
      context.fillStyle = fill;
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.translate(x, y);
      if (turn) context.rotate((turn * Math.PI) / 180);
      if (halo) {
        Object.assign(context, { strokeStyle: halo, lineWidth: 3, lineJoin: "round" });
        context.strokeText(said, 0, 0);
      }
      context.fillText(said, 0, 0);
      context.restore();
    },
    image(canvas, x, y, width, height) {
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, x, y, width, height);
    },
    clip(x, y, width, height, draw) {
      context.save();
      context.beginPath();
      context.rect(x, y, Math.max(0, width), Math.max(0, height));
      context.clip();
      draw(pen);
      context.restore();
    },
    link: (_, draw) => draw(pen),
  };
  return pen;
}

/** The shape of a severity: · ▲ ■; a disc for none. */
export function shape(pen, severity, x, y, size, style) {
  const half = size / 2;
  if (severity === "warning") {
    pen.path([[x, y - half, x + half * 1.1, y + half * 0.9, x - half * 1.1, y + half * 0.9]], style, true);
  } else if (severity === "critical") {
    pen.rect(x - half * 0.9, y - half * 0.9, size * 0.9, size * 0.9, style);
  } else {
    pen.disc(x, y, half * 0.85, style);
  }
}

/** ✕, for what failed. */
export function cross(pen, x, y, size, style) {
  const half = size / 2;
  pen.path([[x - half, y - half, x + half, y + half], [x - half, y + half, x + half, y - half]], style);
}
