// SPDX-License-Identifier: Apache-2.0
// The login: the server checks the token, and the page keeps it for changes to the store. If reading needs it, too, the
// server also answers with a cookie that no script can read.

import "./theme.js";
import { keepToken } from "./access.js";
import { api } from "./api.js";
import { addressOf } from "./root.js";

let back = addressOf("/"); // the page that the user requested

/** Whether an address stays here: a browser reads «/⇥/evil.example» as another site's. */
function inside(address) {
  try {
    return new URL(address, location.origin).origin === location.origin;
  } catch {
    return false;
  }
}

async function enter(token) {
  try {
    await api.send("POST", addressOf("/api/login"), { token });
    keepToken(token);
    location.replace(inside(back) ? back : addressOf("/"));
  } catch (error) {
    document.getElementById("said").textContent = error.message;
    document.getElementById("token").focus();
  }
}

document.getElementById("login").addEventListener("submit", (event) => {
  event.preventDefault();
  enter(document.getElementById("token").value.trim());
});

/** The part after «#»: a fragment is never sent, nor logged. It may change while this page is open. */
function read() {
  const told = new URLSearchParams(location.hash.slice(1));
  back = told.get("back") ?? back;
  if (location.hash) history.replaceState(null, "", location.pathname);
  if (told.get("token")) enter(told.get("token"));
  else document.getElementById("token").focus();
}

addEventListener("hashchange", read);
read();
