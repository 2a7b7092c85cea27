# SPDX-License-Identifier: Apache-2.0
"""A sink that logs to Weights & Biases offline, into a folder; `wandb sync` uploads it later.

    Monitor("runs.db", sinks=[WeightsAndBiases()])       then:  wandb sync wandb/offline-run-*

Nothing is sent and nobody is logged in, unless the user asks for `mode="online"` and has logged in before.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError, unknown
from fedvitals.protocols import Sink
from fedvitals.records import LayerStats, Metric, Record, Run
from fedvitals.sinks.curves import NODES, Bars, Curves, link_of, tags_of
from fedvitals.sinks.spread import all_but, plain

MODES = ("offline", "online", "shared")
SETTINGS: dict[str, Any] = {
    # W&B must not capture the user's screen, code or machine: only what we log is logged.
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "login_timeout": 1,  # a prompt from one of our threads that nobody can answer
}


class WeightsAndBiases(Sink):
    """A sink that logs to Weights & Biases: scalars and histograms over rounds, and the configuration.

    The run's id becomes a tag, and is in the notes.

    Args:
        project: The project that runs are logged to.
        mode: «offline» writes files, «online» sends to W&B's server.
        folder: Where `wandb/` is created.
        entity: The user or team at W&B.
        nodes: How many clients get curves of their own, or which ones.
        layers_of: Nodes whose layers are shown, beside those of the whole round.
        store: The file or address of the store, to be mentioned in the run's description.
    """

    name = "wandb"
    ignores = all_but(LayerStats, Metric)

    def __init__(
        self,
        project: str = "fedvitals",
        *,
        mode: str = "offline",
        folder: str | os.PathLike[str] = ".",
        entity: str | None = None,
        nodes: int | Sequence[str] = NODES,
        layers_of: Sequence[str] = (),
        store: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(unknown("mode of Weights & Biases", mode, MODES))
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb", "The Weights & Biases exporter") from error
        self._project, self._mode, self._entity = project, mode, entity
        self.folder = Path(folder)
        self._store = store
        self._curves = Curves(nodes, layers_of)
        self._runs: dict[str, Any] = {}
        self.folders: dict[str, Path] = {}  # of each run, once it is open

    def write(self, records: Sequence[Record], /) -> None:
        """Log one row for each round among the records.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        for record in records:
            if isinstance(record, Run):
                self._open(record)
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for drawn in self._curves.of(records):
            row = rows.setdefault((drawn.run, drawn.round), {"round": drawn.round, "_timestamp": drawn.at})
            if isinstance(drawn, Bars):
                row[drawn.tag] = self._wandb.Histogram(np_histogram=(drawn.counts, drawn.edges))
            else:
                row[drawn.tag] = drawn.value
            row["_timestamp"] = max(row["_timestamp"], drawn.at)
        for (run, _), row in rows.items():
            (self._runs.get(run) or self._open(Run(run, run))).log(row)

    def close(self) -> None:
        """End the runs of W&B that are open."""
        for run in self._runs.values():
            run.finish()
        self._runs.clear()

    def _open(self, run: Run) -> Any:
        if run.id not in self._runs:
            self.folder.mkdir(parents=True, exist_ok=True)
            opened = self._wandb.init(
                project=self._project,
                entity=self._entity,
                name=plain(run.name),
                id=re.sub(r"[^\w.-]", "_", run.id)[:100] or None,
                dir=str(self.folder),
                config=dict(run.config),
                tags=["fedvitals", plain(run.id, 64)],
                notes=link_of(run, self._store),
                reinit="create_new",
                settings=self._wandb.Settings(mode=self._mode, **SETTINGS),
            )
            # Rows carry their round: late records belong to an earlier one, which W&B's own step forbids.
            opened.define_metric("round")
            opened.define_metric("*", step_metric="round")
            self._runs[run.id] = opened
            self.folders[run.id] = Path(opened.dir).parent
        opened = self._runs[run.id]
        opened.config.update({"fedvitals_run": tags_of(run)}, allow_val_change=True)
        return opened
