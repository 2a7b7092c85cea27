// SPDX-License-Identifier: Apache-2.0
// Where one is: what a picture that leaves the page must still say. The header writes it, the charts read it.

export const place = { run: "", page: "" };
