# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of a monitored run: opens the store and the sinks on the first event, and closes them once."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedvitals
from fedvitals.analysis.live import LiveProfile
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.diagnosis.live_detectors import LiveDetectors
from fedvitals.errors import ConfigError, EmptyStoreError
from fedvitals.measurements import Emitted
from fedvitals.monitor.emission import Writer
from fedvitals.monitor.findings import RunFindings
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.spine import Spine
from fedvitals.monitor.stall_watch import StallWatch
from fedvitals.monitor.taping import RunTape
from fedvitals.protocols import RecordWriter, Sink, TapeRecorder
from fedvitals.resources.capture import Capture
from fedvitals.resources.machine import MachineSampler
from fedvitals.store import PostgresStore, SqliteStore, open_reader, open_store, spill_folder, store_target
from fedvitals.store.read.queries import get_run, list_runs
from fedvitals.transport.logs import EventHandler
from fedvitals.transport.privacy import PrivacyPolicy
from fedvitals.transport.sink_writer import SOURCE, SinkWriter
from fedvitals.transport.spill import readmit

logger = logging.getLogger("fedvitals")
FAMILY_OF = {issue.code: issue.family for issue in ISSUES}


class Lifecycle:
    """Begins a run on its first event and ends it once.

    `make_writer` opens the writer for records. `tape`, `machine` and `watch`, if given, open and close with the run.
    """

    def __init__(
        self,
        spine: Spine,
        lost: LostRecords,
        make_writer: Callable[[], Writer],
        *,
        tape: RunTape | None = None,
        machine: MachineSampler | None = None,
        watch: StallWatch | None = None,
    ) -> None:
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self._lost, self._make_writer, self._tape, self._machine = lost, make_writer, tape, machine
        self._watch = watch
        self._handler: EventHandler | None = None  # set while the run is open
        self._closed = False
        self._process: int | None = None  # the process that opened the run

    def silence(self) -> None:
        """Disable the tape and machine sampling; before the run begins."""
        self._tape = self._machine = self._watch = None

    @property
    def is_of_parent(self) -> bool:
        """Whether another process, which forked this one, opened the run: then this process must not write to it."""
        return self._process not in (None, os.getpid())

    def open(self) -> None:
        """Begin the run, unless it has begun or ended. From here on log lines belong to it."""
        if self._emission.writer is None and not self._closed:
            self._guard("opening the store", self._open)

    def writer(self) -> Writer | None:
        """Return the run's writer, opening the run if needed; None if the run ended before anything happened."""
        if self._emission.writer is not None or self._closed:
            return self._emission.writer
        return self._open()

    def _open(self) -> Writer:
        """Open the run.

        Deferred to the first event, since frameworks import user modules in processes that never train.
        """
        with self._context.lock:
            if self._emission.writer is not None:
                return self._emission.writer
            writer, self._process = self._make_writer(), os.getpid()
            self._emission.connect(writer)
            self._handler = EventHandler(self._emission.emit, run=self._context.run.id, fallback=self._scopes.here)
            logging.getLogger().addHandler(self._handler)
            self._context.start(versions())
            writer.emit(self._context.run)
            if self._tape is not None:
                self._tape.open()
            if self._machine is not None:
                self._guard("watching the machine", self._machine.start)
            if self._watch is not None:
                self._guard("watching for stalls", self._watch.start)
            return writer

    def set_host(self, host: str, config: Mapping[str, Any], policy: PrivacyPolicy, trace: str | None) -> None:
        """Set the host that owns the run, before it begins. ConfigError if it has begun."""
        with self._context.lock:
            if self._emission.writer is not None:
                raise ConfigError(
                    f"This monitor watches a run of its own already, '{self._context.run.name}': make a new one to "
                    "attach."
                )
            self._context.set_host(host, config, policy, trace)

    def flush(self, timeout: float, *, own: bool = False) -> bool:
        """Wait until everything is written.

        `own`: only by the store and the detectors, not by the tape or the user's sinks.
        """
        deadline = time.monotonic() + timeout
        taped = own or self._tape is None or self._tape.flush(timeout)  # first, because it lists its files in the store
        left = max(0.0, deadline - time.monotonic())
        return bool(self._guard("flush()", lambda: self._emission.flush(left, own=own))) and taped

    def close(self) -> None:
        """End the run: write pending records and close everything that `open` opened."""
        self._closed = True
        if self._machine is not None:
            self._machine.stop()
        if self._watch is not None:
            self._watch.stop()
        writer = self._emission.writer
        if writer is None:
            return
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        if self._tape is not None:
            self._guard("closing the tape", self._tape.close)
        self._context.finish()
        self._emission.emit(self._context.run)
        close: Callable[[], None] = writer.close
        if isinstance(writer, SinkWriter):
            close = functools.partial(writer.close, before_store=self._lost.record_final)
        self._guard("closing the sinks", close)
        self._guard("telling of lost records", self._lost.spill_unrecorded)
        if self._lost.count:
            logger.warning("fedvitals lost %d records of run %s.", self._lost.count, self._context.run.id)
        elif self._lost.total:
            logger.warning(
                "Sinks lost %d records of run %s; the store is not affected.", self._lost.total, self._context.run.id
            )


class Outputs:
    """The store, the detectors and the user's sinks of one run.

    `again`: the store may already have the run, which is then continued. `profile`: whether to record what bounds each
    round.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None,
        sinks: Sequence[Sink],
        spine: Spine,
        findings: RunFindings,
        tape: RunTape,
        *,
        profile: bool,
        again: bool,
    ) -> None:
        self._target, self._sinks = store, sinks
        self._context, self._emission, self._guard = spine.context, spine.emission, spine.guard
        self._findings, self._tape, self._profile, self._again = findings, tape, profile, again
        self._store: SqliteStore | PostgresStore | None = None  # set once it is open
        self._detects = True

    def silence(self) -> None:
        """Disable all of them; before the run begins."""
        self._target, self._sinks, self._profile, self._detects = None, (), False, False

    def open(self) -> SinkWriter:
        """Open all of them, each behind a queue."""
        self._store = None if self._target is None else open_store(self._target)
        sinks: list[Sink] = [] if self._store is None else [self._store]
        live: list[LiveProfile | LiveDetectors] = [LiveProfile(self._emission.emit)] if self._profile else []
        detectors = self._findings.open() if self._detects else None
        if detectors is not None:
            live.append(detectors)
        if live:
            sinks.append(_SinkSequence(live, self._guard.report))
        spill = None if self._target is None else spill_folder(self._target)
        for sink in self._sinks:
            self._guard("opening a sink", functools.partial(sink.prepare, spill, FAMILY_OF))
        if spill is not None and spill.is_dir():
            self._guard("taking back spilled records", lambda: readmit(spill, sinks[0]))
        if self._again and self._target is not None:
            self._guard("looking up the run", self._resume)
        # A new source name: sequence numbers restart, and would otherwise be mistaken for records that are already
        # stored.
        source = f"{SOURCE}-{os.urandom(4).hex()}" if self._again else SOURCE
        return SinkWriter(
            [*sinks, *self._sinks, *(self._tape.sinks if self._detects else ())],
            own=len(sinks),
            policy=self._context.policy,
            spill=spill,
            strict=self._guard.strict,
            source=source,
        )

    def _resume(self) -> None:
        """Continue from where the run of this id ended, if the store has it."""
        target = store_target(self._target)
        if isinstance(target, Path) and not target.exists():
            return
        with contextlib.suppress(EmptyStoreError), open_reader(self._target) as reader:
            if self._context.run.id in {summary.id for summary in list_runs(reader)}:
                self._context.resume(get_run(reader, self._context.run.id))

    @property
    def file(self) -> Path | None:
        """The store's file; None if the store is a database, or there is none."""
        target = None if self._target is None else store_target(self._target)
        if isinstance(self._store, SqliteStore):
            target = self._store.path  # the store continues in another file if this one was replaced
        return target.absolute() if isinstance(target, Path) else None


class _SinkSequence(Sink):
    """Several sinks behind one queue: a round's shares are recorded before the detectors see the next one."""

    name = "detectors"
    ignores = LiveDetectors.ignores
    takes_measurements = takes_transfers = True

    def __init__(self, sinks: Sequence[LiveProfile | LiveDetectors], failed: Callable[[Exception, str], None]) -> None:
        self._sinks, self._failed = sinks, failed

    def write(self, records: Sequence[Emitted], /) -> None:
        for sink in self._sinks:
            try:
                sink.write(records)
            except Exception as error:  # noqa: BLE001 - it must not keep the records from the next one
                self._failed(error, "profiling" if isinstance(sink, LiveProfile) else "the detectors")


def machine_sampler(spine: Spine) -> MachineSampler:
    """Return a sampler of this process's machine, which records metrics of the server in the open round."""

    def record(metrics: Mapping[str, float]) -> None:
        here = spine.scopes.round or spine.scopes.of_run()
        values = [(name, value, None) for name, value in metrics.items()]
        spine.emission.record.metrics(replace(here, node="server"), values)

    return MachineSampler(record, lambda error: spine.guard.report(error, "sampling the machine"))


def check_parts(sinks: Any, capture: Any, tape: Any) -> None:
    """Check the arguments as soon as they are passed in."""
    if tape is not None and not isinstance(tape, TapeRecorder):
        raise ConfigError(f"tape= takes a fv.Tape(budget=...); got {tape!r}.")
    for sink in sinks:
        if not isinstance(sink, RecordWriter):
            raise ConfigError(
                f"sinks= takes objects with a method write(records); got {sink!r}. Exporters: docs/exporters.md."
            )
    if capture is not None and not isinstance(capture, Capture):
        raise ConfigError(f"capture= takes a fv.Capture(rounds=..., nodes=..., steps=...); got {capture!r}.")


def close_at_exit(closeable: Any) -> None:
    """Register an object to be closed at exit. Held weakly, so that registration does not keep it alive."""
    reference = weakref.ref(closeable)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(closeable, atexit.unregister, close)


def versions() -> dict[str, str]:
    """Return the versions of fedvitals, Python and NumPy, and of torch if it is loaded."""
    return {
        "fedvitals": fedvitals.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_torch_versions(),
    }


def _torch_versions() -> dict[str, str]:
    """Return the versions of torch and its kernels if torch has been imported; never imports it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from fedvitals.kernels import backend  # noqa: PLC0415 - imports torch

    return {"torch": str(getattr(torch, "__version__", "")), "kernel": str(backend())}
