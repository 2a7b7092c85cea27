# SPDX-License-Identifier: Apache-2.0
"""Stored runs in a notebook: `fv.open("runs.db")` gives runs, and a run gives its numbers as tables."""

from fedvitals.notebook.runs import Runs, StoredRun, open  # noqa: A004 - `fv.open`, as users write it

__all__ = ["Runs", "StoredRun", "open"]
