// SPDX-License-Identifier: Apache-2.0
// The path in front of all addresses, if a reverse proxy has one for the dashboard: «/fedvitals», or «».

const ROOT = new URL("..", import.meta.url).pathname.replace(/\/$/, "");

/** An address of the dashboard: addressOf("/runs"). */
export function addressOf(path) {
  return ROOT + path;
}

/** The path of this page, without the root. */
export function pathHere() {
  return location.pathname.startsWith(`${ROOT}/`) ? location.pathname.slice(ROOT.length) : "/";
}
