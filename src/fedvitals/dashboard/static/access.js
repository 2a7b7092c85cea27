// SPDX-License-Identifier: Apache-2.0
// Whether this page may change the store. The token of the printed address is kept for this origin, which is one port
// of one host: unlike a cookie, it is never sent to another server on this machine.

import { addressOf } from "./root.js";

const KEY = `fedvitals-token${addressOf("")}`; // two dashboards behind one proxy have the same origin
export const READ_ONLY = "This page can only read. To tag, mute or delete, open the address that `fedvitals ui` printed when it started";

export const access = { changes: false };

export function keepToken(token) {
  try {
    localStorage.setItem(KEY, token);
  } catch {
    // a browser without storage: the page can only read
  }
}

/** The header with the token; none without a token. */
export function authorization() {
  try {
    const token = localStorage.getItem(KEY);
    return token ? { Authorization: `Bearer ${token}` } : {};
  } catch {
    return {};
  }
}

/** Called when another page of this dashboard was opened with the token. */
export function onToken(listener) {
  addEventListener("storage", (event) => event.key === KEY && listener());
}

/** The properties of a control that changes something: disabled, with the reason, if that is not allowed. */
export function changing(props) {
  return access.changes ? props : { ...props, disabled: true, title: `${READ_ONLY.replaceAll("`", "")}.` };
}
