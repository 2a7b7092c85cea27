// SPDX-License-Identifier: Apache-2.0
// The shared axis of a page. All its charts draw the same rounds, and show the same round under the pointer.

import { gesture } from "../gesture.js";

/** Rounds (integers) by default; `continuous` for seconds. Reported changes: "view", "hover", "domain". */
export class Axis {
  constructor({ from = 0, to = 0, left = null, right = null, continuous = false, label = "round" } = {}) {
    this.domain = [from, Math.max(from, to)];
    this.view = [...this.domain];
    this.hover = null;
    this.left = left; // gutters in pixels, if a page sets its own: names to the left, values to the right
    this.right = right;
    this.names = 0; // pixels needed for the longest name at the left
    this.ends = 0; // and for the longest at the right
    this.continuous = continuous;
    this.label = label;
    this.listeners = new Set();
    this.empty = from === 0 && to === 0; // no domain yet: the first `extend` sets it
    this.wanted = null; // a view requested before there were data
  }

  /** Calls back with what changed; returns a function that ends that. */
  on(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  tell(what) {
    for (const listener of [...this.listeners]) listener(what, this);
  }

  /** Whether the whole domain is visible: then new rounds are followed. */
  get whole() {
    return this.view[0] <= this.domain[0] && this.view[1] >= this.domain[1];
  }

  setView(low, high) {
    let [from, to] = low <= high ? [low, high] : [high, low];
    if (!this.continuous) [from, to] = [Math.round(from), Math.round(to)];
    const [first, last] = this.domain;
    from = Math.max(first, Math.min(from, last));
    to = Math.min(last, Math.max(to, first));
    if (this.continuous ? !(to > from) : to < from) return;
    if (from === this.view[0] && to === this.view[1]) return;
    this.view = [from, to];
    this.tell("view");
  }

  reset() {
    this.setView(...this.domain);
  }

  setHover(round) {
    const wanted = round === null || round === undefined || !Number.isFinite(round) ? null : round;
    if (wanted === this.hover) return;
    this.hover = wanted;
    this.tell("hover");
  }

  /** Extends the data from `first` to `last`. The view stays, unless it was the whole domain. */
  extend(first, last) {
    if (!Number.isFinite(first) || !Number.isFinite(last)) return;
    const from = this.empty ? first : Math.min(first, this.domain[0]);
    const to = this.empty ? last : Math.max(last, this.domain[1]);
    const followed = this.empty || this.whole;
    this.empty = false;
    if (from === this.domain[0] && to === this.domain[1]) return;
    this.domain = [from, to];
    if (followed) this.view = [from, to];
    this.tell("domain");
    if (!this.wanted) return;
    this.restoring = true; // requested by the address, not by the user
    this.want(...this.wanted);
    this.restoring = false;
  }

  /** The view requested by an address: applied now, or when the data have arrived. */
  want(low, high) {
    this.wanted = this.empty ? [low, high] : null;
    if (!this.empty) this.setView(low, high);
  }

  /** A chart has names this wide at its left: the gutter of all charts grows to fit. */
  roomForNames(pixels) {
    if (pixels <= this.names) return;
    this.names = pixels;
    this.tell("domain");
  }

  /** The same for the right, where the lines end. */
  roomForEnds(pixels) {
    if (pixels <= this.ends) return;
    this.ends = pixels;
    this.tell("domain");
  }

  /** Zooms in (factor < 1) or out, around the round under the pointer or the middle. */
  zoom(factor) {
    const [low, high] = this.view;
    const centre = this.hover ?? (low + high) / 2;
    const share = (high - low) * factor;
    const at = high > low ? (centre - low) / (high - low) : 0.5;
    if (this.continuous) this.setView(centre - share * at, centre + share * (1 - at));
    else this.setView(Math.floor(centre - share * at + 0.5), Math.ceil(centre + share * (1 - at) - 0.5));
  }

  /** Moves sideways by a share of the view. */
  pan(share) {
    const [low, high] = this.view;
    const wanted = (high - low + (this.continuous ? 0 : 1)) * share;
    const [first, last] = this.domain;
    const moved = Math.max(first - low, Math.min(last - high, this.continuous ? wanted : Math.round(wanted)));
    this.setView(low + moved, high + moved);
  }
}

/** Keeps the view in the address (`from`, `to`), so that a zoom can be shared; returns a function that ends that. */
export function bindAxis(axis, params, names = ["from", "to"]) {
  let reading = false;
  const begins = gesture();
  const read = () => {
    const [from, to] = names.map((name) => params.get(name, null));
    reading = true;
    const wanted = [from, to].map((text) => (text === null || text === "" ? NaN : Number(text)));
    if (wanted.every(Number.isFinite)) axis.want(...wanted);
    else if (!axis.whole) axis.reset();
    reading = false;
  };
  read();
  const stop = axis.on((what) => {
    if (what !== "view" || reading) return;
    const [from, to] = axis.whole ? [null, null] : axis.view;
    params.set({ [names[0]]: from, [names[1]]: to }, { push: !axis.restoring && begins() });
  });
  // After the shell's own listener has processed the address.
  const back = () => queueMicrotask(read);
  window.addEventListener("popstate", back);
  return () => {
    stop();
    window.removeEventListener("popstate", back);
  };
}
