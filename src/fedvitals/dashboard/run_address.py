# SPDX-License-Identifier: Apache-2.0
"""Puts the id of a run into an address and takes it out again, also ids that a path does not keep.

A server takes «%2F» for a slash, and a browser resolves «..» before it asks. No new run has such an id, but stores of
before may. static/params.js does the same.
"""

from __future__ import annotations

from urllib.parse import quote, unquote


def run_page(run: str) -> str:
    """Return the path of a run's page."""
    awkward = run.startswith("~") or "/" in run or "\\" in run or run in (".", "..")
    part = "~" + quote(run, safe="").replace(".", "%2E") if awkward else run
    return f"/runs/{quote(part, safe='~')}"


def run_of_part(part: str) -> str:
    """Return the id, the name or the beginning of an id that a part of a path means, which was decoded once."""
    return unquote(part[1:]) if part.startswith("~") else part
