// SPDX-License-Identifier: Apache-2.0
// Several runs in one parameter of the address. Users choose ids: each is escaped before a comma joins them.

import { link } from "../params.js";
import { addressOf } from "../root.js";

export const MOST = 6; // side by side

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // written by hand, with its own percent sign
  }
}

export function chosenRuns(params, name = "runs") {
  return [...new Set(params.list(name).map(unescaped))].slice(0, MOST);
}

export function joined(runs) {
  return runs.length ? runs.map(encodeURIComponent).join(",") : null;
}

export function compareLink(runs, more) {
  return link(addressOf("/compare"), { runs: joined(runs), ...more });
}
