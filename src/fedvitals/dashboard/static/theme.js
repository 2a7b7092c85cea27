// SPDX-License-Identifier: Apache-2.0
// Light or dark: as set by the system, until the user chooses. Charts learn of it by the event «themechange».

const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem("fedvitals-theme");
  } catch {
    return null; // a browser without storage
  }
}

export function theme() {
  return document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");
}

function tell() {
  dispatchEvent(new Event("themechange"));
}

export function changeTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("fedvitals-theme", next);
  } catch {
    // lasts as long as the page
  }
  tell();
}

const chosen = stored();
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
system.addEventListener("change", tell);
