// SPDX-License-Identifier: Apache-2.0
// Clients: one vital sign of all over the rounds. Those in trouble come first, then those unlike the others.

import { decodeGrid } from "../api.js";
import { heatMap } from "../charts/heatmap.js";
import { h } from "../dom.js";
import { number } from "../format.js";
import { go, link, runLink } from "../params.js";
import { ask, bandFrame, chooser, closer, COLUMNS, remade, shownOf } from "./band.js";
import { signGroups, signWords } from "./sign_words.js";
import { empty } from "./states.js";

const ROWS = 300; // clients in this chart, the worst; the clients' page has all
const SORTS = [["worst", "worst first"], ["value", "largest first"], ["name", "by name"]];
const ORDER = { worst: "in trouble, then furthest from the others", value: "largest mean first", name: "by name" };

export function clientBand(ctx, axis) {
  const [map, none] = [h("div", {}), h("div", {})];
  const sign = chooser(ctx, "show", "sign");
  const sort = chooser(ctx, "sorted", "sort");
  const names = h("datalist", { id: "overview-clients" });
  const choose = h("input", {
    class: "field client-field", type: "search", list: "overview-clients", placeholder: "none", maxlength: 300, autocomplete: "off",
    on: { change: () => ctx.params.set({ client: choose.value.trim() || null }) },
  });
  const pick = h("label", { class: "field-label" }, "client on top", choose, names);
  const offer = h("button", { class: "link-button small", type: "button", hidden: true, title: "the finding’s evidence" });
  const frame = bandFrame("clients", "who is unlike the others", [sign.node, sort.node, pick, offer], none, map);
  none.append(empty("No client reported values of its own.", "From privacy level 2 on they do."));
  const chart = remade(map, (host, how) => heatMap(host, {
    ...how, axis, rowHeight: 14, maxHeight: 336,
    onCell: (row, round) => go(link(runLink(ctx.run, "clients", row), { round })),
    rowHref: (row) => runLink(ctx.run, "clients", row),
    selected: (row) => row === ctx.params.get("client"),
  }));

  function draw(grid, now, wanted, order) {
    chart.with({ title: signWords(now.signs.find((one) => one.name === wanted), wanted), unit: grid.unit, colours: grid.smallest < 0 ? "signed" : "even" }).update({
      grid: decodeGrid(grid),
      flags: now.flags,
      marks: now.cases.filter((one) => one.node && !one.muted && one.since !== null)
        .map((one) => ({ row: one.node, from: one.since, to: one.still_there ? now.last_round : one.last, severity: one.severity })),
      note: [
        ORDER[order],
        grid.rows.length < grid.total_rows ? `${number(grid.rows.length)} of ${number(grid.total_rows)} clients` : "",
        shownOf(grid.columns.length, grid.total_columns),
      ].filter(Boolean).join("; "),
    });
    const list = JSON.stringify(grid.rows);
    if (names.dataset.of !== list) {
      names.dataset.of = list;
      names.replaceChildren(...grid.rows.map((name) => h("option", { value: name })));
    }
  }

  let usual = null; // shown unless the user chooses: requested once, so that a chart does not change

  return {
    node: frame.node,

    follow(now, signal) {
      const told = now.signs.map((one) => one.name);
      const asked = ctx.params.get("sign");
      usual ??= now.sign;
      const wanted = told.includes(asked) ? asked : told.includes(usual) ? usual : now.sign;
      const order = ORDER[ctx.params.get("sort")] ? ctx.params.get("sort") : "worst";
      none.hidden = wanted !== null;
      map.hidden = sign.node.hidden = sort.node.hidden = pick.hidden = wanted === null;
      if (wanted === null) offer.hidden = true;
      if (wanted === null) return;
      sign.show(signGroups(now.signs), wanted);
      offer.hidden = !now.verdict.key || now.sign === wanted; // a finding that came later, or another choice
      offer.textContent = `show ${signWords(now.signs.find((one) => one.name === now.sign), now.sign)}`;
      offer.onclick = () => ctx.params.set({ sign: now.sign }, { push: true });
      sort.show([["", SORTS]], order);
      if (document.activeElement !== choose) choose.value = now.chosen ?? "";
      frame.fill(
        () => ask(ctx, "grid", { sign: wanted, sort: order, rows: ROWS, columns: COLUMNS, ...closer(axis, COLUMNS) }, signal),
        (grid) => draw(grid, now, wanted, order),
      );
    },

    destroy: () => chart.destroy(),
  };
}
