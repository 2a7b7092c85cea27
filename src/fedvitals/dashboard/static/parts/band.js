// SPDX-License-Identifier: Apache-2.0
// A band of the overview: its name at the left, its charts on the page's axis, and what they share.

import { of } from "../api.js";
import { fill, h } from "../dom.js";
import { runLink } from "../params.js";
import { empty } from "./states.js";

export const POINTS = 1000; // per line; with more rounds, some share a bucket
export const COLUMNS = 600; // per heat map

/** The frame of a band: `controls` above its pictures. */
export function bandFrame(name, about, controls, ...hosts) {
  const trouble = h("div", { class: "band-trouble" });
  const node = h("section", { class: "band", data: { band: name.split(" ")[0] }, "aria-label": name },
    h("div", { class: "band-name" }, h("h2", { text: name }), h("p", { class: "small muted", text: about })),
    h("div", { class: "band-body" }, controls && h("div", { class: "band-controls" }, controls), trouble, hosts));
  let turn = 0;
  return {
    node,
    /**
     * Load the band's content and draw it, unless it was requested again in the meantime. Errors are shown in the band.
     */
    async fill(get, draw) {
      const mine = ++turn;
      try {
        const data = await get();
        if (mine !== turn) return;
        draw(data);
        fill(trouble);
      } catch (error) {
        if (error.name === "AbortError" || mine !== turn) return;
        if (error.status === undefined) console.error(error);
        fill(trouble, empty("This part could not be drawn.", error.message));
      }
    },
  };
}

/** Requests one of the shared answers; lists become one parameter per entry. */
export function ask(ctx, what, wanted, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(wanted)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined) query.append(name, one);
  }
  return ctx.api.get(`${of(ctx.run, what)}?${query}`, {}, signal);
}

/** The part of the run to request again when zoomed in: none while all rounds fit. */
export function closer(axis, most) {
  const [first, last] = axis.domain;
  if (last - first < most || axis.whole) return {};
  return { from: axis.view[0], to: axis.view[1] };
}

/** The note if not every round has a point of its own. */
export function shownOf(shown, total) {
  const joined = Math.ceil(total / Math.max(1, shown));
  return joined > 1 ? `1 of ${joined} points shown, extremes kept` : "";
}

/** The values of a series, with NaN where a value was not finite. */
export function valuesOf(one) {
  const odd = new Set(one.odd);
  return one.values.map((value, i) => (value === null && odd.has(one.rounds[i]) ? NaN : value));
}

/** A series of the server as a line of a chart. */
export function lineOf(one, more) {
  const joined = one.total > one.values.filter((value) => value !== null).length + one.odd.length;
  return {
    name: one.of === "federation" || one.of === "server" ? one.title : one.node === null ? `${one.title}, median client` : one.node,
    rounds: one.rounds,
    values: valuesOf(one),
    ...(joined ? { low: one.low, high: one.high } : {}),
    ...more,
  };
}

/** The federation's own line; none if only clients have the sign, since their band shows it. */
export function globalLine(one) {
  return one.total && one.of !== "median client" ? [lineOf(one, { name: "global model", index: 0 })] : [];
}

/** The lines of single clients, in colours that no other line of the page has. */
export function clientLines(run, found, lines) {
  return found.filter((one) => one.total).map((one) => lineOf(one, { href: runLink(run, "clients", one.node), index: 1 + lines.indexOf(one.node) }));
}

/** A select that keeps its value in the address. */
export function chooser(ctx, label, parameter) {
  const select = h("select", { class: "field", on: { change: () => ctx.params.set({ [parameter]: select.value }, { push: true }) } });
  const node = h("label", { class: "field-label" }, label, select);
  let known = "";
  return {
    node,
    /** groups: [[name, [[value, text], …]], …] */
    show(groups, value) {
      const now = JSON.stringify(groups);
      if (now !== known) {
        known = now;
        fill(select, groups.map(([name, options]) => {
          const made = options.map(([key, text]) => h("option", { value: key, text }));
          return name ? h("optgroup", { label: name }, made) : made;
        }));
      }
      if (select.value !== value) select.value = value ?? "";
    },
  };
}

/** One chart in a place, recreated when its settings change (its unit, its colours). */
export function remade(host, make) {
  let chart = null;
  let made = "";
  return {
    with(options) {
      const now = JSON.stringify(options);
      if (now !== made) {
        chart?.destroy();
        chart = make(host, options);
        made = now;
      }
      return chart;
    },
    destroy: () => chart?.destroy(),
  };
}
