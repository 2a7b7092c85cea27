// SPDX-License-Identifier: Apache-2.0
// The current location, which a picture that leaves the page must still state. Written by the header, read by the
// charts.

export const place = { run: "", page: "" };
