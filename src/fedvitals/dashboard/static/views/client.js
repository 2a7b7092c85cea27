// SPDX-License-Identifier: Apache-2.0
// One client: broken or only different? The verdict, its signs against the cohort, its layers, its time, its events.

import { decodeGrid, of } from "../api.js";
import { Axis, bindAxis, heatMap, stackChart } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number, seconds } from "../format.js";
import { go, link, runLink } from "../params.js";
import { chooser, remade } from "../parts/band.js";
import { caseList, eventList, factList, labelBars, lossBands, numbersTable, panel } from "../parts/client_facts.js";
import { clientSigns } from "../parts/client_signs.js";
import { evidencePlots } from "../parts/evidence_plots.js";
import { empty } from "../parts/states.js";
import { verdictBox } from "../parts/verdict.js";
import { labelOf, nameOf } from "../parts/who.js";

export const title = "Client";

const SLOWER = 1.2; // times the median client's seconds, from which the factor is shown

export function view(root, ctx) {
  const { run, params } = ctx;
  const node = ctx.path.node;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const verdict = verdictBox();
  const cases = caseList(run);
  const rests = h("div", {});
  const plots = evidencePlots(axis, (round) => go(runLink(run, "rounds", String(round))));
  const signs = clientSigns(ctx, axis, node);
  const place = h("nav", { class: "row client-place", "aria-label": "Other clients" });
  const layers = layerPart(ctx, axis, node);
  const times = timePart(ctx, axis, node);
  const side = { facts: h("div", {}), labels: h("div", {}), losses: h("div", {}), failures: h("div", {}), events: h("div", {}) };
  const found = panel("findings and evidence", cases.node, plots.node, rests);
  const more = h("p", { class: "small" });
  let neighbours = {};
  let first = true;
  root.append(h("div", { class: "page client-page" },
    h("div", {},
      place, verdict.node, found,
      panel("vital signs against the other clients, evidence first, then the most deviating", signs.nodes),
      panel("layers against the median client", layers.nodes),
      panel("where its time went", times.nodes)),
    h("aside", { "aria-label": "Facts and events" },
      panel("reported values", side.facts), panel("labels", side.labels), side.losses, panel("failures", side.failures),
      panel("events, newest first", side.events), more)));

  const step = (where, label) => Object.assign(() => neighbours[where] && go(runLink(run, "clients", neighbours[where])), { label });

  return {
    async load(signal) {
      const [page, told] = await Promise.all([
        ctx.api.get(of(run, "client"), { node }, signal),
        ctx.api.get(of(run, "client", "signs"), { node }, signal),
      ]);
      return { page, told };
    },

    show({ page, told }) {
      if (ctx.status.first_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      neighbours = page;
      if (first) axis.setHover(params.number("round"));
      first = false;
      document.title = [page.row.label || node, ctx.status.name, "fedvitals"].join(" · ");
      verdict.show(run, { ...page.verdict, node: null }, page.cases.find((one) => one.key === page.verdict.key)?.severity ?? null);
      fill(place,
        h("a", { href: runLink(run, "clients"), text: "all clients" }),
        h("span", { class: "muted" }, node, labelOf(page.row.label), `${page.row.group ? `, in ${page.row.group}` : ""}: ${number(page.place)} of ${number(page.clients)}, worst first`),
        page.worse !== null && h("a", { href: runLink(run, "clients", page.worse), title: "k" }, "← ", nameOf(page.worse)),
        page.better !== null && h("a", { href: runLink(run, "clients", page.better), title: "j" }, nameOf(page.better), " →"),
        h("a", { href: link(runLink(run, "map"), { client: node }), text: "on the map" }),
        h("a", { href: link(runLink(run), { client: node }), text: "in the overview" }));
      found.hidden = !page.cases.length;
      cases.show(page.cases);
      evidence(page.verdict.key);
      const flags = flagsOf(page);
      signs.show(told, flags, `${ctx.status.last_round}.${ctx.status.last_record}`);
      layers.show(flags);
      times.show(flags);
      beside(page);
    },

    keys: { j: step("better", "the next client, worst first"), k: step("worse", "the one before it") },

    destroy() {
      unbind();
      for (const part of [plots, signs, layers, times]) part.destroy();
    },
  };

  function flagsOf(page) {
    const flags = page.cases.filter((one) => one.since !== null && !one.muted).map((one) => ({
      round: one.since, until: one.still_there ? ctx.status.last_round : one.last, severity: one.severity,
      label: one.title, href: runLink(run, "findings", one.key),
    }));
    const chosen = params.number("round");
    if (chosen !== null) flags.push({ round: chosen, severity: "note", label: `round ${chosen}`, href: runLink(run, "rounds", String(chosen)) });
    return flags;
  }

  async function evidence(key) {
    plots.node.hidden = !key;
    if (!key) return put(rests, null, () => null);
    try {
      const [full, behind] = await Promise.all(["", "evidence"].map((part) => ctx.api.get(of(run, "findings", key, ...(part ? [part] : [])), {}, ctx.signal)));
      plots.show(full.case, behind);
      return put(rests, full.numbers, () => numbersTable(full.numbers));
    } catch (error) {
      return error.name === "AbortError" ? null : put(rests, null, () => null);
    }
  }

  function beside(page) {
    const raw = (kind) => h("a", { href: link(of(run, "records"), { kind, node }), text: kind });
    put(side.facts, page.facts, () => (page.facts.length ? factList(page.facts) : empty("Nothing of its data.", "`data` and `loss` in monitor.client tell.")));
    put(side.labels, page.labels, () => (page.labels.length ? labelBars(page.labels) : empty("Its labels are not known.", "From privacy level 3 on, with `data` that yields (x, y).")));
    side.losses.hidden = !page.losses.length;
    put(side.losses, page.losses, () => page.losses.length > 0 && panel("training losses", lossBands(page.losses)));
    put(side.failures, page.failures, () => (page.failures.length
      ? [eventList(run, page.failures),
        page.total_failures > page.failures.length && h("p", { class: "small muted", text: `${page.failures.length} of ${page.total_failures} shown` }),
        !page.tracebacks && h("p", { class: "small muted", text: "No traceback is kept: Monitor(tracebacks=True) keeps them." })]
      : empty("None.")));
    put(side.events, page.events, () => (page.events.length ? foldedEvents(page.events) : empty("None.")));
    fill(more, "raw records: ", ["metric", "span", "transfer", "event", "finding"].map((kind, i) => [i ? " · " : "", raw(kind)]));
  }

  /** Warnings and errors are visible; routine information on demand. */
  function foldedEvents(events) {
    const [loud, quiet] = [events.filter((one) => one.level !== "info"), events.filter((one) => one.level === "info")];
    return [
      loud.length ? eventList(run, loud) : empty("No warning, no error."),
      quiet.length > 0 && h("details", {}, h("summary", { class: "small", text: `${quiet.length} for information` }), eventList(run, quiet)),
    ];
  }
}

/** New content only after a change: an open traceback stays open. */
function put(host, data, make) {
  const now = JSON.stringify(data);
  if (host.dataset.now === now) return;
  host.dataset.now = now;
  fill(host, make());
}

/** The rounds in view: data that cannot be read for all of them are read for these. */
function looked(axis) {
  return axis.whole ? {} : { from: axis.view[0], to: axis.view[1] };
}

function layerPart(ctx, axis, node) {
  const family = chooser(ctx, "of its", "family");
  const statistic = chooser(ctx, "statistic", "statistic");
  const controls = h("div", { class: "band-controls", hidden: true }, family.node, statistic.node);
  const host = h("div", { hidden: true });
  const none = h("div", {});
  let flags = [];
  const chart = remade(host, (where, how) => heatMap(where, {
    ...how, axis, rowHeight: 14, maxHeight: 364, colours: "signed",
    onCell: (_, round) => go(runLink(ctx.run, "rounds", String(round))),
    rowHref: (row) => link(runLink(ctx.run, "layers"), { layer: row }),
  }));
  async function load() {
    const wanted = { node, family: ctx.params.get("family"), statistic: ctx.params.get("statistic"), ...looked(axis) };
    try {
      const data = await ctx.api.get(of(ctx.run, "client", "layers"), wanted, ctx.signal);
      controls.hidden = !data.families.length;
      host.hidden = data.grid === null;
      family.show([["", data.families.map((name) => [name, name])]], data.family);
      statistic.show([["", data.statistics.map((name) => [name, name])]], data.statistic);
      const why = data.families.length ? "None of this client in the rounds that were read." : "Per-layer statistics need privacy level 3 and the preset «standard».";
      fill(none, data.grid === null && empty("No layer statistics.", why));
      if (data.grid === null) return;
      const ratio = data.how === "log2 ratio";
      chart.with({ title: `${data.family} ${data.statistic}, ${ratio ? "+1 is twice the median client’s" : "difference from the median client"}`, unit: ratio ? "log₂" : "" }).update({
        grid: decodeGrid(data.grid), flags, marks: [],
        note: `median of ${number(data.clients)} clients${data.older ? `; the newest ${number(data.rounds)} rounds that have them` : ""}`,
      });
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === undefined) console.error(error);
      // A statistic of another family, from an address: the family's own first one is used.
      if (error.status === 422 && (wanted.family || wanted.statistic)) ctx.params.set({ family: null, statistic: null });
      else fill(none, empty("The layers could not be drawn.", error.message));
    }
  }
  return {
    nodes: [controls, none, host],
    show(marks) {
      flags = marks;
      load();
    },
    destroy: () => chart.destroy(),
  };
}

function timePart(ctx, axis, node) {
  const host = h("div", {});
  const none = h("div", {});
  const said = h("p", { class: "small muted" });
  const waiting = h("input", { type: "checkbox", on: { change: () => ctx.params.set({ waiting: waiting.checked ? "1" : null }) } });
  const toggle = h("label", { class: "field-label small" }, waiting, "with waiting");
  const chart = stackChart(host, { title: "seconds by part", unit: "seconds", axis, height: 150, onRound: (round) => go(runLink(ctx.run, "rounds", String(round))) });
  return {
    nodes: [toggle, none, host, said],
    async show(flags) {
      try {
        const data = await ctx.api.get(of(ctx.run, "client", "times"), { node, ...looked(axis) }, ctx.signal);
        const all = ctx.params.get("waiting") === "1";
        waiting.checked = all;
        host.hidden = toggle.hidden = said.hidden = !data.rounds.length;
        fill(none, !data.rounds.length && empty("Its time was not taken apart.", "Profiling is on by default; see Monitor(profile=)."));
        chart.update({
          rounds: data.rounds, parts: data.parts.filter((part) => all || !part.waiting), flags,
          note: `${data.clock} clock${data.rounds.length < data.of ? `; ${number(data.rounds.length)} of ${number(data.of)} rounds` : ""}`,
        });
        said.textContent = compared(data);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status === undefined) console.error(error);
        fill(none, empty("Its time could not be drawn.", error.message));
      }
    },
    destroy: () => chart.destroy(),
  };
}

/** Its newest round compared with the median client's. */
function compared(data) {
  const [own, usual, round] = [data.own.at(-1), data.median.at(-1), data.rounds.at(-1)];
  if (own === null || own === undefined) return "";
  const times = own > SLOWER * usual ? `, ${number(own / usual, 2)} times as long` : "";
  return `Round ${round}: ${seconds(own)}${usual ? `${times}; the median client took ${seconds(usual)}` : ""}.`;
}
