# SPDX-License-Identifier: Apache-2.0
"""What is known about a monitored run: its record, its layer tables, its privacy policy and its trace id."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedvitals.records import LayerTable, Run
from fedvitals.transport.privacy import PrivacyPolicy
from fedvitals.transport.timing import new_trace


class RunContext:
    """The facts that all parts of a monitor share. They change only through the methods below.

    `lock` is held while the run is opened and while layer tables are added. `continued`: whether the store knew the run
    before. `tables` are all layer tables by digest; `own_tables` only those of models seen in this process or in our
    own workers.
    """

    def __init__(self, run: Run, policy: PrivacyPolicy) -> None:
        self.run, self.policy = run, policy
        self.trace = new_trace()
        self.continued = False
        self.tables: dict[str, LayerTable] = {}
        self.own_tables: dict[str, LayerTable] = {}
        self.lock = threading.RLock()

    def set_host(self, host: str, config: Mapping[str, Any], policy: PrivacyPolicy, trace: str | None) -> None:
        """Replace the host, the configuration and the policy, and the trace id if one is given."""
        self.run = replace(self.run, host=host, config=config)
        self.policy, self.trace = policy, trace or self.trace

    def resume(self, stored: Run) -> None:
        """Continue a run that the store has, with its start and its layer tables."""
        self.tables = {table.digest: table for table in stored.tables}
        self.run = replace(self.run, started=stored.started, tables=stored.tables)
        self.continued = True

    def start(self, versions: Mapping[str, str]) -> None:
        """Record the software versions, and when the run began unless it continues another."""
        self.run = replace(self.run, started=self.run.started or time.time(), versions=versions)

    def finish(self) -> None:
        """Record when the run ended."""
        self.run = replace(self.run, finished=time.time())

    def knows(self, tables: Mapping[str, LayerTable], *, own: bool) -> bool:
        """Whether `add_tables` would change nothing. `tables`: by digest."""
        return all(digest in self.tables and (digest in self.own_tables or not own) for digest in tables)

    def add_tables(self, tables: Mapping[str, LayerTable], *, own: bool) -> bool:
        """Add layer tables by digest. Returns whether the run's record has changed."""
        if own:
            self.own_tables = {**self.own_tables, **tables}
        if all(digest in self.tables for digest in tables):
            return False
        self.tables = {**self.tables, **tables}
        self.run = replace(self.run, tables=tuple(self.tables.values()))
        return True

    def own_table(self, rows: str, layers: int) -> str | None:
        """Return the digest of our newest own table with this kind and number of rows; None if there is none."""
        fitting = (t.digest for t in reversed(self.own_tables.values()) if t.rows == rows and len(t.layers) == layers)
        return next(fitting, None)

    def table_of(self, tables: Mapping[str, str], rows: str, layers: int) -> str | None:
        """Return the table that the results name for such rows if it has as many layers, else `own_table`."""
        named = self.tables.get(tables.get(rows, ""))
        return named.digest if named is not None and len(named.layers) == layers else self.own_table(rows, layers)
