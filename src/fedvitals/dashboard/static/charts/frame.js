// SPDX-License-Identifier: Apache-2.0
// What all charts have: a heading with a menu, layers to draw on, a size that follows the page, a theme, announcements.
//
// A chart provides what only it knows (all but `paint` and `height` are optional):
//   height(width) → pixels of everything       layout(width, height, scroll) → box for the painters
//   paint(pen, box) the picture                paintFoot(pen, box), footHeight: below what scrolls
//   paintHover(pen, box) what follows the pointer        rows(box) → the names at the left, as links
//   heavy() → canvas instead of SVG            summary() → the label for those who do not see
//   readout() → the value under the pointer    tip() → {head, rows, foot}, or null
//   costly() → not drawn before it is seen
//   csv() → rows of cells                      blank() → a sentence where there is nothing to draw
//   key(event) → true if it was for the chart; move, leave, click, double, drag: pointer (see below)

import { announce, fill, h, s } from "../dom.js";
import { onTheme } from "../colour.js";
import { unitName } from "../format.js";
import { canvasPen, svgPen } from "./pen.js";
import { attachMenu } from "./menu.js";
import { attachPointer } from "./pointer.js";
import { atRest, forget, soon } from "./soon.js";
import { hideTip, showTip } from "./tip.js";

const NEAR = "200px"; // a chart this close to the window is drawn at once
const WAITING = "Not loaded yet.";

const sized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.chartFrame?.resized(entry.contentRect.width);
});
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) entry.target.chartFrame?.appeared(entry.isIntersecting);
  },
  { rootMargin: NEAR },
);

// Paper has no window: before printing, charts out of sight are drawn as well.
window.addEventListener("beforeprint", () => {
  for (const figure of document.querySelectorAll("figure.chart")) figure.chartFrame?.drawNow();
});

function build(kind, options, scrolls) {
  const title = h("span", { class: "chart-title", text: options.title ?? "" });
  const unit = h("span", { class: "chart-unit", text: unitName(options.unit) });
  const note = h("span", { class: "chart-note", text: options.note ?? "" });
  const extra = h("span", { class: "chart-extra" });
  const readout = h("span", { class: "chart-readout" });
  const head = h("figcaption", { class: "chart-head" }, title, unit, note, extra, readout);
  const svg = s("svg", { class: "chart-base", "aria-hidden": "true" });
  const over = s("svg", { class: "chart-over", "aria-hidden": "true" });
  const label = options.title || "Chart"; // until it is drawn, and can describe itself
  const about = { tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": label };
  const plot = h("div", { class: "chart-plot", ...about }, svg, over);
  const rows = h("div", { class: "chart-rows" });
  const stage = h("div", { class: "chart-stage" }, plot, rows);
  const space = scrolls ? h("div", { class: "chart-space" }, stage) : null;
  const scroller = scrolls ? h("div", { class: "chart-scroll" }, space) : null;
  const foot = scrolls ? s("svg", { class: "chart-foot", "aria-hidden": "true" }) : null;
  const blank = h("div", { class: "chart-blank", hidden: true });
  const figure = h("figure", { class: "chart", data: { chart: kind } }, head, scroller ?? stage, foot, blank);
  return { figure, head, title, unit, note, extra, readout, plot, svg, over, rows, space, scroller, foot, blank, stage };
}

/** The frame around one chart; `chart` is what it draws. */
export function createFrame(host, kind, options, chart) {
  const scrolls = Boolean(options.maxHeight && chart.scrolls);
  const dom = build(kind, options, scrolls);
  const ended = new AbortController();
  const state = { width: 0, visible: false, stale: true, destroyed: false, fed: false };

  const frame = {
    chart,
    dom,
    options,
    signal: ended.signal,
    title: options.title ?? "",
    unit: unitName(options.unit),
    box: null,
    pointer: null, // the pointer's position, in pixels of the plot; null when it is elsewhere
    focused: false,
    footHeight: scrolls ? (chart.footHeight ?? 0) : 0,
    get active() {
      return frame.pointer !== null || frame.focused;
    },
    redraw() {
      state.stale = true;
      if (!state.visible) {
        reserve();
        if (!chart.costly?.()) atRest(drawUnseen); // so that it is up to date when it is scrolled to, printed or captured
      }
      soon(draw);
    },
    /** Data have arrived: until then nothing can be said of the content. */
    fed() {
      state.fed = true;
      frame.redraw();
    },
    rehover() {
      soon(hover);
    },
    /** The value that the pointer or the keys have reached, announced for the keys. */
    say(text) {
      announce(text);
    },
    resized(width) {
      if (Math.abs(width - state.width) < 0.5) return;
      state.width = Math.floor(width);
      frame.redraw();
    },
    appeared(visible) {
      state.visible = visible;
      if (visible && state.stale) soon(draw);
    },
    drawNow() {
      draw(true);
    },
    setNote(text) {
      if (dom.note.textContent !== text) dom.note.textContent = text;
    },
    setTitle(text) {
      frame.title = text;
      if (dom.title.textContent !== text) dom.title.textContent = text;
    },
    destroy() {
      state.destroyed = true;
      ended.abort();
      forgetTheme();
      sized.unobserve(dom.figure);
      seen.unobserve(dom.figure);
      forget(draw, hover, drawUnseen);
      hideTip(frame);
      dom.figure.remove();
    },
  };

  /**
   * Reserves its room before it is drawn: otherwise all charts of a page would begin in sight, one on top of the other.
   */
  function reserve() {
    if (!state.fed || (chart.blank?.() ?? null) !== null) return;
    const whole = Math.max(1, Math.round(chart.height(state.width || Math.min(window.innerWidth, 1200))));
    dom.stage.style.height = `${scrolls ? Math.min(whole, options.maxHeight) : whole}px`;
  }

  function measure() {
    const whole = Math.max(1, Math.round(chart.height(state.width)));
    const height = scrolls ? Math.min(whole, options.maxHeight) : whole;
    const scroll = scrolls ? Math.max(0, Math.min(dom.scroller.scrollTop, whole - height)) : 0;
    frame.box = { ...chart.layout(state.width, height, scroll), width: state.width, height, scroll, whole, live: true };
    return frame.box;
  }

  function draw(anyway = false) {
    if (state.destroyed || state.width < 40 || !(state.visible || (anyway && state.stale))) return;
    state.stale = false;
    const said = state.fed ? (chart.blank?.() ?? null) : WAITING;
    dom.blank.classList.toggle("chart-waiting", !state.fed);
    showBlank(dom, said);
    if (said !== null) {
      frame.box = null;
      dom.plot.setAttribute("aria-label", `${frame.title}: ${said}`);
      return;
    }
    const box = measure();
    place(dom, box, frame.footHeight);
    if (chart.heavy?.()) paintCanvas(dom, box, chart);
    else paintSvg(dom, box, chart);
    if (dom.foot) {
      dom.foot.replaceChildren();
      chart.paintFoot?.(svgPen(dom.foot), box);
    }
    chart.rows?.(dom.rows, box);
    dom.plot.setAttribute("aria-label", chart.summary?.() ?? frame.title);
    hover();
  }

  function drawUnseen() {
    if (!state.visible) draw(true);
  }

  function hover() {
    if (state.destroyed || !frame.box) return;
    dom.over.replaceChildren();
    chart.paintHover?.(svgPen(dom.over), frame.box);
    const said = chart.readout?.() ?? "";
    if (dom.readout.textContent !== said) dom.readout.textContent = said;
    const tip = frame.active ? (chart.tip?.() ?? null) : null;
    if (!tip) return hideTip(frame);
    const at = dom.plot.getBoundingClientRect();
    const point = frame.pointer ?? chart.spot?.() ?? { x: at.width / 2, y: at.height / 3 };
    showTip(frame, at.left + point.x, at.top + point.y, tip);
  }

  dom.figure.chartFrame = frame;
  const forgetTheme = onTheme(() => frame.redraw());
  if (scrolls) dom.scroller.addEventListener("scroll", () => frame.redraw(), { passive: true, signal: ended.signal });
  attachMenu(frame);
  attachPointer(frame);
  host.append(dom.figure);
  sized.observe(dom.figure);
  seen.observe(dom.figure);
  return frame;
}

function showBlank(dom, said) {
  const blank = said !== null;
  if (dom.blank.hidden === !blank && (!blank || dom.blank.textContent === said)) return;
  dom.blank.hidden = !blank;
  (dom.scroller ?? dom.stage).hidden = blank;
  if (dom.foot) dom.foot.style.display = blank ? "none" : "";
  fill(dom.blank, said);
}

function setSize(node, width, height) {
  node.setAttribute("width", width);
  node.setAttribute("height", height);
}

function place(dom, box, footHeight) {
  dom.stage.style.height = `${box.height}px`;
  setSize(dom.over, box.width, box.height);
  if (dom.space) {
    dom.space.style.height = `${box.whole}px`;
    dom.scroller.style.height = `${box.height}px`;
    // Reachable by keys if it scrolls, and no tab stop otherwise.
    if (box.whole > box.height) dom.scroller.classList.add("chart-scrolls");
    else dom.scroller.classList.remove("chart-scrolls");
  }
  if (dom.foot) setSize(dom.foot, box.width, footHeight);
}

function paintSvg(dom, box, chart) {
  dom.canvas?.remove();
  dom.canvas = null;
  setSize(dom.svg, box.width, box.height);
  dom.svg.replaceChildren();
  chart.paint(svgPen(dom.svg), box);
}

function paintCanvas(dom, box, chart) {
  const ratio = window.devicePixelRatio || 1;
  if (!dom.canvas) {
    dom.svg.replaceChildren();
    dom.canvas = h("canvas", { class: "chart-base" });
    dom.plot.prepend(dom.canvas);
  }
  const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
  const context = dom.canvas.getContext("2d");
  if (dom.canvas.width !== width || dom.canvas.height !== height) {
    Object.assign(dom.canvas, { width, height });
    dom.canvas.style.width = `${box.width}px`;
    dom.canvas.style.height = `${box.height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  chart.paint(canvasPen(context), box);
}
