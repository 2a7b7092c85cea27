// SPDX-License-Identifier: Apache-2.0
// Clients: one vital sign of all of them over the rounds, and a row for each. The worst come first.

import { decodeGrid, of } from "../api.js";
import { Axis, bindAxis, heatMap } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number } from "../format.js";
import { go, link, runLink } from "../params.js";
import { ask, chooser, closer, COLUMNS, remade, shownOf } from "../parts/band.js";
import { clientTable, PAGE } from "../parts/client_table.js";
import { signGroups, signWords } from "../parts/sign_words.js";
import { empty } from "../parts/states.js";

export const title = "Clients";
const ROWS = 2000; // clients in the chart: the most that one answer holds
const HEALTH = [["", "all"], ["ill", "with findings"], ["critical", "critical"], ["warning", "warning"], ["note", "note"], ["well", "without a finding"], ["failed", "that failed"]];
const SORTS = [["worst", "worst first"], ["value", "largest first"], ["name", "by name"]];

export function view(root, ctx) {
  const { run, params } = ctx;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const sign = chooser(ctx, "vital sign", "sign");
  const order = chooser(ctx, "rows", "rows");
  const health = chooser(ctx, "show", "health");
  const group = chooser(ctx, "in", "group");
  const map = h("div", { class: "clients-map" });
  const trouble = h("div", {});
  const counts = h("p", { class: "muted counts" });
  const said = h("p", { class: "muted small", role: "status" });
  const pager = h("nav", { class: "row pager", "aria-label": "Pages of the table" });
  const search = h("input", {
    class: "field", type: "search", placeholder: "name", maxlength: 200, autocomplete: "off", "aria-label": "Search by name",
    on: { input: () => soon(() => params.set({ search: search.value || null, offset: null })) },
  });
  const chart = remade(map, (host, how) => heatMap(host, {
    ...how, axis, rowHeight: 14, maxHeight: 420,
    onCell: (row, round) => go(link(runLink(run, "clients", row), { round })),
    rowHref: (row) => runLink(run, "clients", row),
    selected: (row) => row === params.get("client"),
  }));
  const table = clientTable(ctx, {
    choose: (node) => params.set({ client: params.get("client") === node ? null : node }),
    sort: (key, descending) => params.set({ sort: key === "worst" ? null : key, descending: descending ? "1" : null, offset: null }),
  });
  root.append(h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", { text: "Clients" }), counts),
    h("section", { "aria-label": "Clients over the rounds" }, h("div", { class: "band-controls" }, sign.node, order.node), trouble, map),
    h("section", { "aria-label": "All clients" },
      h("div", { class: "row table-controls" }, search, health.node, group.node, said), table.node, pager)));

  let timer = null;
  function soon(act) {
    clearTimeout(timer);
    timer = setTimeout(act, 150);
  }

  const chosenOrder = () => ({ sort: params.get("sort", "worst"), descending: params.get("descending") === "1" });

  async function load(signal) {
    const wanted = {
      ...chosenOrder(), search: params.get("search"), group: params.get("group"), health: params.get("health"),
      limit: PAGE, offset: params.number("offset", 0),
    };
    return ctx.api.get(of(run, "clients"), wanted, signal);
  }

  let turn = 0;
  async function picture() {
    const mine = ++turn;
    const rows = params.get("rows", "worst");
    try {
      const overview = await ctx.api.get(of(run, "overview"), {}, ctx.signal);
      const wanted = overview.signs.some((one) => one.name === params.get("sign")) ? params.get("sign") : overview.sign;
      if (mine !== turn) return;
      map.hidden = sign.node.hidden = order.node.hidden = wanted === null;
      if (wanted === null) {
        fill(trouble, empty("No client reported values of its own.", "From privacy level 2 on they do."));
        return;
      }
      const grid = await ask(ctx, "grid", { sign: wanted, sort: rows, rows: ROWS, columns: COLUMNS, ...closer(axis, COLUMNS) }, ctx.signal);
      if (mine !== turn) return;
      fill(trouble, !grid.rows.length && empty("No client has a value of this sign.", "Choose another one."));
      map.hidden = !grid.rows.length;
      sign.show(signGroups(overview.signs), wanted);
      if (!grid.rows.length) return;
      const known = overview.signs.find((one) => one.name === wanted);
      chart.with({ title: signWords(known, wanted), unit: grid.unit, colours: grid.smallest < 0 ? "signed" : "even" }).update({
        grid: decodeGrid(grid),
        flags: [],
        marks: overview.cases.filter((one) => one.node && !one.muted && one.since !== null)
          .map((one) => ({ row: one.node, from: one.since, to: one.still_there ? overview.last_round : one.last, severity: one.severity })),
        note: [
          rows === "worst" ? "in trouble, then furthest from the others" : "",
          grid.rows.length < grid.total_rows ? `${number(grid.rows.length)} of ${number(grid.total_rows)} clients` : "",
          shownOf(grid.columns.length, grid.total_columns),
        ].filter(Boolean).join("; "),
      });
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      if (error.status === undefined) console.error(error);
      fill(trouble, empty("The heat map could not be drawn.", error.message));
    }
  }

  return {
    load,

    show(page) {
      if (ctx.status.first_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      if (document.activeElement !== search) search.value = params.get("search", "");
      order.show([["", SORTS]], params.get("rows", "worst"));
      health.show([["", HEALTH]], params.get("health", ""));
      group.show([["", [["", "all groups"], ...page.groups.map((name) => [name, name])]]], params.get("group", ""));
      group.node.hidden = !page.groups.length;
      fill(counts, [`${number(page.total)} clients: `, ...["critical", "warning", "note", "well"].map((kind, i) =>
        [i ? " · " : "", h("a", {
          href: link(runLink(run, "clients"), { health: kind }), class: page.health[kind] && kind !== "well" ? `sev-${kind}` : "muted",
          text: `${number(page.health[kind])} ${kind === "well" ? "without a finding" : kind}${kind !== "well" && kind !== "critical" && page.health[kind] !== 1 ? "s" : ""}`,
        })])]);
      const filtered = page.matching < page.total ? `${number(page.matching)} of ${number(page.total)} clients, ` : "";
      said.textContent = page.total ? `${filtered}${page.order}` : "No client yet: rows appear with the first round, by themselves.";
      table.show(page, chosenOrder(), params.get("client"));
      turnPages(page);
      picture();
    },

    keys: { "/": Object.assign(() => search.focus(), { label: "search a client" }) },

    destroy() {
      unbind();
      clearTimeout(timer);
      chart.destroy();
    },
  };

  function turnPages(page) {
    pager.hidden = page.matching <= PAGE && !page.offset;
    const last = Math.min(page.offset + PAGE, page.matching);
    const to = (offset) => link(location.pathname, { ...Object.fromEntries(new URLSearchParams(location.search)), offset: offset || null });
    fill(pager,
      page.offset > 0 && h("a", { class: "button quiet", href: to(Math.max(0, page.offset - PAGE)), text: "← before" }),
      h("span", { class: "muted", text: page.rows.length ? `${number(page.offset + 1)} to ${number(last)} of ${number(page.matching)}` : "none" }),
      last < page.matching && h("a", { class: "button quiet", href: to(page.offset + PAGE), text: "next →" }));
  }
}
