# SPDX-License-Identifier: Apache-2.0
"""A run's chart: opened at the first event, written to until the end, and careful never to hurt the patient.

It knows the run's identity and layer tables, owns the way to the sinks, and catches whatever goes wrong on our side.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedvitals
from fedvitals import kernels
from fedvitals.diagnosis.live import LiveDetectors
from fedvitals.probes.results import Results
from fedvitals.protocols import Detector, Sink
from fedvitals.records import Finding, LayerTable, Record, Run
from fedvitals.scope import Scope
from fedvitals.stats import FAMILIES
from fedvitals.store import MemoryStore, open_store, store_path
from fedvitals.telemetry.logs import EventHandler
from fedvitals.telemetry.outlet import Outlet
from fedvitals.telemetry.recorder import Recorder
from fedvitals.telemetry.spill import readmit

logger = logging.getLogger("fedvitals")


class Chart:
    def __init__(
        self,
        run: Run,
        store: str | os.PathLike[str] | None,
        sinks: Sequence[Sink],
        detectors: Sequence[Detector],
        *,
        privacy: int,
        strict: bool,
        scope: Callable[[], Scope],
    ) -> None:
        self.run, self.strict = run, strict
        self.record = Recorder(self.emit)
        self.found: list[Finding] = []
        self._store, self._sinks, self._detectors = store, sinks, detectors
        self._privacy, self._scope = privacy, scope
        self._tables: dict[str, LayerTable] = {}
        self._outlet: Outlet | None = None
        self._lock = threading.RLock()
        self._reported: set[str] = set()
        self._stop: Callable[[], None] = lambda: None

    def emit(self, record: Record) -> None:
        """Into the queues; the first record opens them."""
        (self._outlet or self._open()).emit(record)

    def tell(self, scope: Scope, results: Results) -> None:
        """Results of measuring, as records of this scope."""
        self.record.metrics(scope, results.metrics)
        for family, matrix, step in results.matrices:
            table = self._table_for(FAMILIES[family].rows, len(matrix))
            if table is not None:
                self.record.layers(scope, family, matrix, table, step)
        if results.sketch is not None:
            self.record.sketch(scope, tuple(results.sketch.tolist()))
        for name, message, data in results.remarks:
            self.record.event(scope, "info", name, message, data)

    def know(self, tables: Mapping[str, LayerTable]) -> None:
        """Write down layer tables the first time they are seen."""
        new = {t.digest: t for t in tables.values() if t.layers and t.digest not in self._tables}
        if new:
            self._tables |= new
            self.run = replace(self.run, tables=tuple(self._tables.values()))
            self.emit(self.run)

    def _table_for(self, rows: str, layers: int) -> str | None:
        """The newest table with rows of this kind and number."""
        fitting = (t.digest for t in reversed(self._tables.values()) if t.rows == rows and len(t.layers) == layers)
        return next(fitting, None)

    def exception(self, name: str, error: BaseException) -> None:
        """What was raised inside a scope, as an event; its words only where the privacy level allows them."""
        self.guard(name, lambda: self.record.exception(self._scope(), name, error, details=self._privacy >= 3))

    # -- opening and closing ------------------------------------------------------------------------------------------

    def _open(self) -> Outlet:
        """Not before the first event: frameworks import a user's module in many processes that never train."""
        with self._lock:
            if self._outlet is not None:
                return self._outlet
            sinks: list[Sink] = [] if self._store is None else [open_store(self._store)]
            if self._detectors:
                sinks.append(LiveDetectors(self.run.id, MemoryStore(), self._detectors, self._take_finding))
            spill = None if self._store is None else Path(f"{store_path(self._store)}.d")
            if spill is not None and spill.is_dir():
                self.guard("taking back spilled records", lambda: readmit(spill, sinks[0]))
            outlet = Outlet([*sinks, *self._sinks], privacy=self._privacy, spill=spill, strict=self.strict)
            self._outlet = outlet
            handler = EventHandler(self.emit, run=self.run.id, fallback=self._scope, tracebacks=self._privacy >= 3)
            logging.getLogger().addHandler(handler)
            self._stop = lambda: logging.getLogger().removeHandler(handler)
            self.run = replace(self.run, started=time.time(), versions=_versions())
            outlet.emit(self.run)
            return outlet

    def _take_finding(self, finding: Finding) -> None:
        self.found.append(finding)
        self.emit(finding)

    @property
    def lost(self) -> int:
        return 0 if self._outlet is None else self._outlet.lost

    def flush(self, timeout: float) -> bool:
        outlet = self._outlet
        return outlet is None or bool(self.guard("flush()", lambda: outlet.flush(timeout)))

    def close(self) -> None:
        outlet = self._outlet
        if outlet is None:
            return
        self._stop()
        self.run = replace(self.run, finished=time.time())
        self.emit(self.run)
        self.guard("closing the sinks", outlet.close)
        if outlet.lost:
            logger.warning("fedvitals lost %d records of run %s.", outlet.lost, self.run.id)

    # -- never harm the patient ---------------------------------------------------------------------------------------

    def guard(self, doing: str, work: Callable[[], Any]) -> Any:
        """The result of our own work, or None if it failed: which never stops the training."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the one promise of this project
            self.report(error, doing)
            return None

    def report(self, error: Exception, doing: str) -> None:
        """Say once per cause what failed on our side."""
        if self.strict:
            raise error
        cause = f"{doing}: {type(error).__name__}: {error}"[:1000]
        if cause in self._reported:
            return
        self._reported.add(cause)
        logger.warning("fedvitals could not finish %s; training goes on.", cause)
        if self._outlet is not None:
            self.record.event(self._scope(), "warning", "monitor.error", cause)


def close_at_exit(closeable: Any) -> None:
    """Close what the user forgot. Weakly held: what was let go earlier is not kept alive for this."""
    reference = weakref.ref(closeable)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(closeable, atexit.unregister, close)


def _versions() -> dict[str, str]:
    return {
        "fedvitals": fedvitals.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "kernel": str(kernels.backend()),
    }
