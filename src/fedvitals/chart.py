# SPDX-License-Identifier: Apache-2.0
"""A run's chart: opened at the first event, written to until the end, and careful never to hurt the patient.

It knows the run's identity and layer tables, owns the way to the sinks, and catches whatever goes wrong on our side.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedvitals
from fedvitals import kernels
from fedvitals.diagnosis.live import LiveDetectors
from fedvitals.probes.results import Results
from fedvitals.protocols import Detector, Node, Sink
from fedvitals.records import Finding, LayerTable, Record, Run
from fedvitals.scope import Scope, current
from fedvitals.stats import FAMILIES
from fedvitals.store import MemoryStore, open_store, store_path
from fedvitals.telemetry.logs import EventHandler
from fedvitals.telemetry.outlet import Outlet
from fedvitals.telemetry.recorder import Recorder
from fedvitals.telemetry.spill import readmit
from fedvitals.telemetry.timing import new_span_id, new_trace

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
    ) -> None:
        self.run, self.strict = run, strict
        self.record = Recorder(self.emit)
        self.found: list[Finding] = []
        self._store, self._sinks, self._detectors = store, sinks, detectors
        self._privacy = privacy
        self._trace = new_trace()
        self.owner: Any = None  # lives as long as the run is open, so that it can be closed at exit
        self.round: Scope | None = None  # that is open
        self.last_round: int | None = None
        self._tables: dict[str, LayerTable] = {}
        self._outlet: Outlet | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._reported: set[str] = set()
        self._stop: Callable[[], None] = lambda: None

    def emit(self, record: Record) -> None:
        """Into the queues; the first record opens them, unless the run has ended without any."""
        if self._outlet is not None or not self._closed:
            (self._outlet or self._open()).emit(record)

    def tell(self, scope: Scope, results: Results) -> None:
        """Results of measuring, as records of this scope."""
        self.record.metrics(scope, results.metrics)
        for family, matrix, step in results.matrices:
            rows = FAMILIES[family].rows
            table = results.tables.get(rows) or self._table_for(rows, len(matrix))
            if table is not None:
                self.record.layers(scope, family, matrix, table, step)
        if results.sketch is not None:
            self.record.sketch(scope, tuple(results.sketch.tolist()))
        for name, message, data in results.remarks:
            self.record.event(scope, "info", name, message, data)

    def know(self, tables: Mapping[str, LayerTable]) -> None:
        """Write down layer tables the first time they are seen."""
        if all(t.digest in self._tables for t in tables.values()):
            return
        with self._lock:
            outlet = self._outlet or self._open()  # first: opening adds to what is known of the run
            self._tables = {**self._tables, **{t.digest: t for t in tables.values()}}
            self.run = replace(self.run, tables=tuple(self._tables.values()))
            outlet.emit(self.run)

    def _table_for(self, rows: str, layers: int) -> str | None:
        """The newest table with rows of this kind and number."""
        fitting = (t.digest for t in reversed(self._tables.values()) if t.rows == rows and len(t.layers) == layers)
        return next(fitting, None)

    def exception(self, scope: Scope, name: str, error: BaseException) -> None:
        """What was raised inside a scope, as an event; its words only where the privacy level allows them."""
        self.guard(name, lambda: self.record.exception(scope, name, error, details=self._privacy >= 3))

    # -- where the training stands ------------------------------------------------------------------------------------

    def here(self) -> Scope:
        """Where the caller stands: its own scope; on a thread without one, the round that is open (or was last)."""
        scope = current.get()
        if scope is not None and scope.run == self.run.id:
            return scope
        return self.round or Scope(self.run.id, self.emit, self.last_round, trace=self._trace)

    def enter(self, node: Node | None, *, group: str | None = None) -> tuple[Scope, Token[Scope | None]]:
        """A scope inside the caller's, and what `leave` needs. Opens the run: log lines inside belong to it."""
        self._ready()
        parent = self.here()
        scope = replace(parent, node=node, group=group or parent.group, span=new_span_id(), parent=parent.span)
        return scope, current.set(scope)

    def enter_round(self, number: int) -> tuple[Scope, Token[Scope | None]]:
        self._ready()
        parent = self.here()
        self.round = replace(parent, round=number, node=None, span=new_span_id(), parent=parent.span)
        self.last_round = number
        return self.round, current.set(self.round)

    def leave(self, token: Token[Scope | None]) -> None:
        # A host may close a scope on another thread than it was opened on; that one has a contextvar of its own.
        with contextlib.suppress(ValueError):
            current.reset(token)

    # -- opening and closing ------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        if self._outlet is None and not self._closed:
            self.guard("opening the store", self._open)

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
            handler = EventHandler(self.emit, run=self.run.id, fallback=self.here, tracebacks=self._privacy >= 3)
            logging.getLogger().addHandler(handler)
            self._stop = lambda: logging.getLogger().removeHandler(handler)
            self.run = replace(self.run, started=time.time(), versions=_versions())
            outlet.emit(self.run)
            return outlet

    def _take_finding(self, finding: Finding) -> None:
        self.found.append(finding)
        self.emit(replace(finding))  # a copy: what is emitted gets an identity, and a detector may say a thing twice

    @property
    def lost(self) -> int:
        return 0 if self._outlet is None else self._outlet.lost

    def flush(self, timeout: float) -> bool:
        outlet = self._outlet
        return outlet is None or bool(self.guard("flush()", lambda: outlet.flush(timeout)))

    def close(self) -> None:
        self._closed = True
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
            self.record.event(self.here(), "warning", "monitor.error", cause)


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
