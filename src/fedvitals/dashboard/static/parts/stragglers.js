// SPDX-License-Identifier: Apache-2.0
// The clients that determined rounds: how often, by how much, through what, and over the rounds.

import { sparkline } from "../charts/index.js";
import { h } from "../dom.js";
import { seconds } from "../format.js";
import { runLink } from "../params.js";
import { rowTable } from "./rows.js";

export function stragglerTable(run) {
  const table = rowTable([
    { name: "node", text: "client", class: "name", cell: (row) => h("a", { href: runLink(run, "clients", row.node), text: row.node }) },
    { name: "determined", text: "rounds", num: true, title: "rounds that it determined, of those it took part in", cell: (row) => `${row.determined} of ${row.rounds}` },
    { name: "lost", text: "lost", num: true, title: "by which its rounds were longer than without it", cell: (row) => seconds(row.seconds_lost) },
    { name: "typical", text: "typical", num: true, title: "its median", cell: (row) => seconds(row.typical) },
    { name: "peers", text: "others", num: true, title: "the others’ median", cell: (row) => seconds(row.peers) },
    { name: "part", text: "by", title: "the work in which it was furthest behind", cell: (row) => row.part },
    { name: "history", text: "its seconds, over the rounds", cell: (row) => sparkline(row.history.map((turn) => turn.seconds), { width: 160, height: 20, label: `seconds of ${row.node} over ${row.history.length} rounds` }) },
  ], { caption: "Stragglers" });
  return {
    node: table.node,
    show(rows) {
      table.show(rows, { nothing: "Nobody held up a round, or nobody is waited for." });
    },
  };
}
