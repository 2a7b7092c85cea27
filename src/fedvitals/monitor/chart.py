# SPDX-License-Identifier: Apache-2.0
"""A run's chart: opened at the first event, written to until the end, and careful never to hurt the patient.

It knows the run's identity and layer tables, owns the way to the sinks, and catches whatever goes wrong on our side.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvitals.analysis.live import LiveProfile
from fedvitals.diagnosis.gaps import MonitorFailure, gaps
from fedvitals.diagnosis.history_cutoff import LOOK_BACK
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.diagnosis.live_detectors import Findings, LiveDetectors
from fedvitals.errors import ConfigError
from fedvitals.loop_tape import LoopTape
from fedvitals.monitor.lifecycle import versions
from fedvitals.probes.results import Results
from fedvitals.protocols import Detector, History, Node, Sink
from fedvitals.protocols import Recorder as TapeRecorder
from fedvitals.records import Event, Finding, LayerTable, Metric, Record, Run, Where
from fedvitals.resources.machine import MachineSampler
from fedvitals.scope import Scope, current
from fedvitals.stats import FAMILIES
from fedvitals.store import MemoryStore, open_reader, open_store, spill_folder, store_target
from fedvitals.store.read.queries import get_run, list_runs
from fedvitals.time_parts import edge_span
from fedvitals.transport.logs import EventHandler
from fedvitals.transport.payload_buffer import Parcel
from fedvitals.transport.privacy import SERVER, WORDS, Policy, released
from fedvitals.transport.recorder import Recorder, where
from fedvitals.transport.sink_writer import SOURCE, Outlet
from fedvitals.transport.spill import Spill, readmit
from fedvitals.transport.timing import new_span_id, new_trace

logger = logging.getLogger("fedvitals")
FAMILY_OF = {issue.code: issue.family for issue in ISSUES}
CAUSES_REPORTED, CAUSES_OF_CLIENT = 100, 10  # a cause whose words differ each time must not fill the user's log


class Chart:
    def __init__(
        self,
        run: Run,
        store: str | os.PathLike[str] | None,
        sinks: Sequence[Sink],
        detectors: Sequence[Detector],
        *,
        policy: Policy,
        strict: bool,
        outlet: Outlet | Parcel | None = None,
        again: bool = False,
        profile: bool = False,
        tape: Any = None,
    ) -> None:
        self.run, self.strict, self._profile = run, strict, profile
        self._tape = tape
        self.recorder: TapeRecorder | None = None  # the tape, once it runs
        self.loop = LoopTape()  # feeds it, where the host does not
        self.continued = False  # whether the store knew the run before; asked when it is opened, and only if `again`
        self._again = again
        self.record = Recorder(self.emit)
        self.found: list[Finding] = []
        self.heard: Callable[[Finding], None] = lambda _: None  # who else is told of findings
        self._memory = MemoryStore(rounds=LOOK_BACK)  # what detectors look back on
        self._store, self._sinks, self._detectors = store, sinks, detectors
        self._live: LiveDetectors | None = None
        self._kept_in: Sink | None = None  # the store, once it is open
        self._policy = policy
        self._training: dict[str | None, int] = {}  # span of each open client → thread that it was opened on
        self.trace = new_trace()
        self.owner: Any = None  # lives as long as the run is open, so that it can be closed at exit
        self.round: Scope | None = None  # that is open
        self.last_round: int | None = None
        self.tables: dict[str, LayerTable] = {}  # by digest
        self.own_tables: dict[str, LayerTable] = {}  # those of models known here and in our own workers
        self._failures: list[MonitorFailure] = []  # of our own work, each cause once
        self._lost_told = 0  # as last recorded
        self.missed = 0  # records of workers that never came home, as far as is known
        self._way_out = outlet
        self._outlet: Outlet | Parcel | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._reported: dict[Node | None, set[str]] = {}  # causes, by the node that they are about
        self._causes: set[str] = set()  # all of them
        self._stop: Callable[[], None] = lambda: None
        self._machine: MachineSampler | None = None

    def emit(self, record: Record, clients: int | None = None) -> None:
        """Into the queues; the first record opens them, unless the run has ended without any.

        `clients`: how many a sum speaks for.
        """
        if self._outlet is not None or not self._closed:
            (self._outlet or self._open()).emit(record, clients=clients, stray=self._stray())

    def admit(self, records: Iterable[Record]) -> None:
        """Records that came home from a worker process, as they are."""
        if self._outlet is None and self._closed:
            return
        outlet = self._outlet or self._open()
        if isinstance(outlet, Outlet):
            for record in records:
                outlet.admit(record)

    def tell(self, scope: Scope, results: Results) -> None:
        """Results of measuring, as records of this scope."""
        sum_of = results.clients
        record = self.record if sum_of is None else Recorder(functools.partial(self.emit, clients=sum_of))
        record.metrics(scope, results.metrics)
        for family, matrix, step in results.matrices:
            rows = FAMILIES[family].rows
            table = self._table_of(results, rows, len(matrix))
            if table is not None:
                record.layers(scope, family, matrix, table, step)
        if results.sketch is not None:
            from fedvitals.kernels.sketch_hash import VERSION  # noqa: PLC0415 - its package imports torch

            record.sketch(scope, tuple(results.sketch.tolist()), VERSION)
        for name, message, data in results.remarks:
            record.event(scope, "info", name, message, data)

    def know(self, tables: Mapping[str, LayerTable], *, own: bool = True) -> None:
        """Write down layer tables the first time they are seen.

        `own`: False for what a sender says of its layers. Nothing that is measured here is ever told by such a table.
        """
        brought = {table.digest: table for table in tables.values()}
        if all(digest in self.tables and (digest in self.own_tables or not own) for digest in brought):
            return
        with self._lock:
            outlet = self._outlet or self._open()  # first: opening adds to what is known of the run
            if own:
                self.own_tables = {**self.own_tables, **brought}
            if all(digest in self.tables for digest in brought):
                return
            self.tables = {**self.tables, **brought}
            self.run = replace(self.run, tables=tuple(self.tables.values()))
            outlet.emit(self.run)

    def table_for(self, rows: str, layers: int) -> str | None:
        """The newest table of our own with rows of this kind and number."""
        fitting = (t.digest for t in reversed(self.own_tables.values()) if t.rows == rows and len(t.layers) == layers)
        return next(fitting, None)

    def _table_of(self, results: Results, rows: str, layers: int) -> str | None:
        """The table that results name for such rows, if it has as many; else the newest that does."""
        named = self.tables.get(results.tables.get(rows, ""))
        return named.digest if named is not None and len(named.layers) == layers else self.table_for(rows, layers)

    def hosted(self, host: str, config: Mapping[str, Any], policy: Policy, trace: str | None) -> None:
        """Whose run it is, known only after the monitor was made."""
        with self._lock:
            if self._outlet is not None:
                raise ConfigError(
                    f"This monitor watches a run of its own already, '{self.run.name}': make a new one to attach."
                )
            self.run = replace(self.run, host=host, config=config)
            self._policy, self.trace = policy, trace or self.trace

    def exception(self, scope: Scope, name: str, error: BaseException) -> None:
        """What was raised inside a scope, as an event."""
        self.guard(name, lambda: self.record.exception(scope, name, error), scope)

    # -- where the training stands ------------------------------------------------------------------------------------

    def here(self) -> Scope:
        """Where the caller stands: its own scope; on a thread without one, the round that is open (or was last)."""
        scope = current.get()
        if scope is not None and scope.run == self.run.id:
            return scope
        return self.round or Scope(self.run.id, self.emit, self.last_round, trace=self.trace)

    def enter(
        self, node: Node | None, *, group: str | None = None, client: bool = False, inside: Scope | None = None
    ) -> tuple[Scope, Token[Scope | None]]:
        """A scope inside the caller's, and what `leave` needs. Opens the run: log lines inside belong to it."""
        self.open()
        around = inside or self.here()
        own, parent = new_span_id(), around.span
        if group is not None and around.node is None and parent is not None:  # a group's Span is known to all by name
            if client:
                parent = edge_span(around.span, group)
            else:
                own = edge_span(around.span, group)
        scope = replace(around, node=node, group=group or around.group, span=own, parent=parent)
        if client:
            self._training[scope.span] = threading.get_ident()
        return scope, current.set(scope)

    def enter_round(self, number: int) -> tuple[Scope, Token[Scope | None]]:
        self.open()
        parent = self.here()
        self.round = replace(parent, round=number, node=None, span=new_span_id(), parent=parent.span)
        self.last_round = number
        return self.round, current.set(self.round)

    def leave(self, scope: Scope, token: Token[Scope | None]) -> None:
        self._training.pop(scope.span, None)
        # A host may close a scope on another thread than it was opened on; that one has a contextvar of its own.
        with contextlib.suppress(ValueError):
            current.reset(token)

    def _stray(self) -> bool:
        """Whether a client's code may be speaking on a thread that does not say so.

        A thread that the client started has no scope. Where a host closes clients in another order than it opened them,
        the thread's scope may be the round's again while one of them still trains. And one may be called «server».
        """
        if not self._training or self._policy.level >= WORDS:
            return False
        scope = current.get()
        if scope is None or scope.run != self.run.id:
            return True
        return scope.node in SERVER and threading.get_ident() in tuple(self._training.values())

    # -- opening and closing ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The run has begun: now, unless it has already. Log lines belong to it from here on."""
        if self._outlet is None and not self._closed:
            self.guard("opening the store", self._open)

    def _open(self) -> Outlet | Parcel:
        """Not before the first event: frameworks import a user's module in many processes that never train."""
        with self._lock:
            if self._outlet is not None:
                return self._outlet
            sinks: list[Sink] = [] if self._store is None else [open_store(self._store)]
            self._kept_in = sinks[0] if sinks else None
            live: list[Sink] = [LiveProfile(self.emit)] if self._profile else []
            if self._detectors:
                own = (self.run.id, self._memory, self._detectors)
                self._live = LiveDetectors(*own, self._take_finding, self.report)
                live.append(self._live)
            if live:
                sinks.append(_OneAfterTheOther(live, self.report))
            spill = None if self._store is None else spill_folder(self._store)
            for sink in self._sinks:
                if hasattr(sink, "begin"):  # an alert may name a family of issues, and wait on disk
                    self.guard("opening a sink", functools.partial(sink.begin, spill, FAMILY_OF))
            if spill is not None and spill.is_dir():
                self.guard("taking back spilled records", lambda: readmit(spill, sinks[0]))
            if self._again and self._store is not None:
                self.guard("looking up the run", self._continue)
            heard = self._sinks if self._tape is None else (*self._sinks, self._tape)  # it wants to hear of findings
            # A source of its own: sequences begin anew, and would be taken for records that are stored already.
            source = f"{SOURCE}-{os.urandom(4).hex()}" if self._again else SOURCE
            told: dict[str, Any] = {"policy": self._policy, "spill": spill, "strict": self.strict, "source": source}
            outlet = self._way_out or Outlet([*sinks, *heard], own=len(sinks), **told)
            self._outlet = outlet
            handler = EventHandler(self.emit, run=self.run.id, fallback=self.here)
            logging.getLogger().addHandler(handler)
            self._stop = lambda: logging.getLogger().removeHandler(handler)
            self.run = replace(self.run, started=self.run.started or time.time(), versions=versions())
            outlet.emit(self.run)
            if self._tape is not None:
                self.guard("opening the tape", functools.partial(self._open_tape, spill))
            if self._machine is not None:
                self.guard("watching the machine", self._machine.start)
            return outlet

    def _open_tape(self, beside: Path | None) -> None:
        """It tells of its own troubles as events."""

        def as_server(work: Callable[[], None]) -> None:  # the tape's own thread speaks for no client
            token = current.set(Scope(self.run.id, self.emit, self.last_round, node="server", trace=self.trace))
            self.guard("telling of the tape", work)
            current.reset(token)

        def tell(level: str, name: str, message: str) -> None:
            as_server(lambda: self.record.event(self.here(), level, name, message))

        def file(record: Record) -> None:
            as_server(lambda: self.emit(record))

        self._tape.settle = self._settle
        self._tape.open(beside or Path("fedvitals.d"), self.run, tell, file, self._policy.level)
        self.recorder = self._tape
        if self.run.host == "torch":
            self.loop.open(self._tape, tell)

    def _settle(self) -> None:
        """Until the store has this round and what the detectors say of it."""
        if self.flush(30.0, own=True):
            self.flush(30.0, own=True)  # what they said in the meantime

    def watch_machine(self) -> None:
        """From the first event to the end, sample the machine that this process is on."""

        def tell(found: Mapping[str, float]) -> None:
            here = self.round or Scope(self.run.id, self.emit, self.last_round)
            self.record.metrics(replace(here, node="server"), [(name, value, None) for name, value in found.items()])

        self._machine = MachineSampler(tell, lambda error: self.report(error, "sampling the machine"))

    def _continue(self) -> None:
        """Begin where the run of this id ended, if the store has it: the same start, the same layers."""
        target = store_target(self._store)
        if isinstance(target, Path) and not target.exists():
            return
        with open_reader(self._store) as reader:
            if self.run.id in {summary.id for summary in list_runs(reader)}:
                known = get_run(reader, self.run.id)
                self.tables = {table.digest: table for table in known.tables}
                self.run = replace(self.run, started=known.started, tables=known.tables)
                self.continued = True

    def _take_finding(self, finding: Finding) -> None:
        # A copy: what is emitted gets an identity. A detector knows no run, and may leave the time to us.
        finding = replace(finding, where=replace(finding.where, run=self.run.id), at=finding.at or time.time())
        self.found.append(finding)
        self.emit(finding)
        self.guard("answering a finding", lambda: self.heard(replace(finding)))

    def history(self) -> History:
        """What detectors have seen so far."""
        return self._memory.history(self.run.id)

    def findings(self, *, complete: bool = True) -> Findings:
        """What the detectors have said so far. `complete`: whether they have seen everything."""
        attendance = None if self._live is None else self._live.attendance
        missing = gaps(self._failures, self.lost)
        if not complete and not self.lost:
            missing = (*missing, "some records still wait for the store or the detectors")
        return Findings(self.found, installed=len(self._detectors), attendance=attendance, gaps=missing)

    @property
    def file(self) -> Path | None:
        target = None if self._store is None else store_target(self._store)
        moved = getattr(self._kept_in, "path", None)  # it goes on beside the store if that was replaced
        target = moved if isinstance(moved, Path) else target
        return target.absolute() if isinstance(target, Path) else None

    @property
    def lost(self) -> int:
        return self.missed + (0 if self._outlet is None else self._outlet.lost)

    def flush(self, timeout: float, *, own: bool = False) -> bool:
        """Until everything is written; `own`: by store and detectors, however long the user's own sinks take."""
        outlet = self._outlet
        return outlet is None or bool(self.guard("flush()", lambda: outlet.flush(timeout, own=own)))

    def close(self) -> None:
        self._closed = True
        if self._machine is not None:
            self._machine.stop()
        outlet = self._outlet
        if outlet is None:
            return
        self._stop()
        if self.recorder is not None:  # it keeps what is around findings: all of them must have come
            self.guard("ending the tape", lambda: (outlet.flush(30.0), self._tape.close()))
        self.run = replace(self.run, finished=time.time())
        self.emit(self.run)
        close: Callable[[], None] = outlet.close
        if isinstance(outlet, Outlet):
            close = functools.partial(outlet.close, before_store=self._tell_lost)
        self.guard("closing the sinks", close)
        if self.lost > self._lost_told and isinstance(outlet, Outlet) and self._store is not None:
            leave = functools.partial(self._leave_word_of_losses, outlet, spill_folder(self._store))
            self.guard("telling of lost records", leave)
        if self.lost:
            logger.warning("fedvitals lost %d records of run %s.", self.lost, self.run.id)

    def _tell_lost(self) -> None:
        """The final count of lost records, for whoever reads the store: the last round told what was known by then."""
        outlet = self._outlet
        if self.lost == self._lost_told or self._store is None or not isinstance(outlet, Outlet):
            return
        self._lost_told, event = self.lost, self._loss_of(outlet)
        for record in (Metric(event.where, event.at, "monitor.lost", float(self._lost_told)), event):
            outlet.store(record)

    def _loss_of(self, outlet: Outlet) -> Event:
        """How many records were lost so far, and by which sink."""
        causes = {**({"workers": self.missed} if self.missed else {}), **outlet.losses}
        listed = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        place, words = Where(self.run.id, self.last_round), f"{self.lost} records were lost ({listed})."
        return Event(place, time.time(), "warning", "telemetry.lost", words, {"records": self.lost})

    def _leave_word_of_losses(self, outlet: Outlet, folder: Path) -> None:
        """Beside the store, which took no more: the next process brings it in."""
        spill = Spill(folder, "losses")
        try:
            spill.append(outlet.stamped(self._loss_of(outlet)))
        finally:
            spill.close(keep=True)

    def record_lost(self, scope: Scope) -> None:
        """How many records were lost so far, as a metric."""
        self._lost_told = self.lost
        self.record.metric(scope, "monitor.lost", self._lost_told)

    # -- never harm the patient ---------------------------------------------------------------------------------------

    def guard(self, doing: str, work: Callable[[], Any], scope: Scope | None = None) -> Any:
        """The result of our own work, or None if it failed: which never stops the training."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the one promise of this project
            self.report(error, doing, scope)
            return None

    def attempt(
        self, doing: str, work: Callable[[], Any], node: Node | None = None, *, here: Callable[[Node | None], Scope]
    ) -> Any:
        """As `guard`, of work that is about one node or about none; `here` gives the scope of either.

        What fails is told of each node for which it does.
        """
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - as in `guard`
            self.report(error, doing, here(node), each=True)
            return None

    def report(self, error: Exception, doing: str, scope: Scope | None = None, *, each: bool = False) -> None:
        """Say once per cause (`each`: and node) what failed on our side, in `scope`, if not where the caller stands.

        Each client has a number of causes of its own: one whose data fail in ever new ways silences nobody else's.
        """
        if self.strict:
            raise error
        kind = type(error).__name__
        cause = f"{doing}: {kind}: {error}"[:1000]
        place, data = where(scope or self.here()), {"doing": doing, "exception": kind}
        own = self._reported.setdefault(place.node, set())
        first = cause not in self._causes
        # The first of each kind is always told: it may be why the run is not judged.
        known = any(failure.doing == doing for failure in self._failures)
        most = (CAUSES_REPORTED if place.node in SERVER else CAUSES_OF_CLIENT) * (1 if known else 10)
        if len(own) >= most or cause in own or not (first or each):
            return
        own.add(cause)
        self._causes.add(cause)
        self._failures.append(MonitorFailure(doing, kind, place.round, place.node))
        event = Event(place, time.time(), "warning", "monitor.error", cause, data)
        # The log is a way out, too: the error may be of the client's own code, and quote its data.
        told = released(event, self._policy, stray=self._stray())
        text = told.message if isinstance(told, Event) else doing
        about = "" if place.node in SERVER else f" (client '{place.node}')"
        if first:
            logger.warning("fedvitals could not finish %s%s; training goes on.", text, about)
        if self._outlet is not None:
            self.emit(event)


class _OneAfterTheOther:
    """Several sinks behind one queue: a round's shares are told before the detectors look at the next one."""

    name = "detectors"
    ignores = LiveDetectors.ignores

    def __init__(self, sinks: Sequence[Sink], failed: Callable[[Exception, str], None]) -> None:
        self._sinks, self._failed = sinks, failed

    def write(self, records: Sequence[Record], /) -> None:
        for sink in self._sinks:
            try:
                sink.write(records)
            except Exception as error:  # noqa: BLE001 - it must not keep the records from the next one
                self._failed(error, "profiling" if isinstance(sink, LiveProfile) else "the detectors")
