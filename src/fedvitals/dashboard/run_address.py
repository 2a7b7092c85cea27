# SPDX-License-Identifier: Apache-2.0
"""Encodes the id of a run in an address and decodes it, including ids that a path does not preserve.

A server takes «%2F» for a slash, and a browser resolves «..» before it asks. No new run has such an id, but older
stores may. static/params.js does the same.
"""

from __future__ import annotations

from urllib.parse import quote, unquote


def run_page(run: str) -> str:
    """Return the path of a run's page."""
    awkward = run.startswith("~") or "/" in run or "\\" in run or run in (".", "..")
    part = "~" + quote(run, safe="").replace(".", "%2E") if awkward else run
    return f"/runs/{quote(part, safe='~')}"


def run_of_part(part: str) -> str:
    """Return the id, the name or the beginning of an id from a path segment that was decoded once."""
    return unquote(part[1:]) if part.startswith("~") else part
