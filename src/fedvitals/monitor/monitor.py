# SPDX-License-Identifier: Apache-2.0
"""The monitor of one run: scopes of rounds, edges and clients around the user's own training code.

    monitor = Monitor("runs.db", run="digits")
    with monitor.round(0, global_model):
        with monitor.client("c7", local_model):
            train(local_model)

Hosts that cannot use `with` call the methods of `monitor.host` instead, an `Observer`. Nothing in here may stop, slow
or change the training: what fails is reported once per cause, counted, and (only with `strict`) raised.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fedvitals import html_display as html
from fedvitals.diagnosis.cases import CASE_TITLES, case_cells
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy, correction_policy_of
from fedvitals.diagnosis.evidence.transformed_updates import TRANSFORMED
from fedvitals.diagnosis.examine import STANDARD, choose_detectors
from fedvitals.diagnosis.live_detectors import FindingList
from fedvitals.monitor.held_back import INITIAL, log_held_back
from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.lifecycle import check_parts
from fedvitals.monitor.loop_corrections import LoopCorrections
from fedvitals.monitor.monitored_run import MonitoredRun
from fedvitals.probes.backends import make_instruments
from fedvitals.protocols import Detector, RecordWriter
from fedvitals.records import Action, AnyName, Run, check_run_id
from fedvitals.resources.capture import Capture
from fedvitals.transport.privacy import LEAST_CLIENTS, described_policy, policy_for
from fedvitals.transport.sink_adapter import as_sink

NEWEST = 5  # problems that a notebook shows of a monitor


class Monitor:
    """Measures and diagnoses one run of a training, and keeps what it measures.

    Nothing is opened before the first event; `close()`, or leaving the `with` block, ends the run.

    Args:
        store: A file or `postgresql://...`; None leaves records to `sinks` alone.
        run: A name for people, which several runs may share.
        probes: What to measure: «light», «standard», «deep», or a list with probes of your own.
        detectors: «standard», a list of your own (which may contain "standard" and names of installed plug-ins), or
            ().
        false_alarms: How many false alarms per 100 healthy rounds you allow.
        cure: What may be done about findings, «off», «suggest» or «auto», for all of them or by issue, family or
            kind of correction, {"NAN_UPDATE": "auto"}: see docs/cure.md.
        sinks: Where records go besides the store: `fv.sinks...`, or objects of your own with `write(records)`.
        privacy: What may leave a client, from 0 (timings only) to 4; by default 3, in a deployment 2: see
            docs/metrics.md.
        cohort: The smallest number of clients over which a sum may be reported at privacy level 1.
        tracebacks: Whether to keep tracebacks of clients' exceptions; by default from privacy level 3 on, and
            never in a deployment.
        config: Settings of your training, kept with the run and shown by `compare`.
        seed: The seed of your training, kept with the run.
        topology: «centralized», «hierarchical» and so on, kept with the run.
        host: Which framework trains, such as «torch»; decides the default of `privacy`.
        profile: Whether to measure what the time and memory of rounds and clients go to (docs/profile.md).
        machine: Whether to sample CPU, memory and GPU, if psutil is installed.
        capture: Which steps to record with torch's profiler: a `fv.Capture`.
        tape: A `fv.Tape()`, from which the run can be replayed: see docs/replay.md.
        update_memory: Bytes of memory for a round's updates, which exact cosines between them need.
        strict: Whether to raise errors that are otherwise only counted and logged; meant for tests.
        id: The run's id, of visible characters without / and \\; a run with this id in the store is continued. By
            default a new one.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = "runs.db",
        run: str = "run",
        *,
        probes: Any = "standard",
        detectors: str | Sequence[Detector | str] = STANDARD,
        false_alarms: float = 1.0,
        cure: str | Mapping[str, str] | CorrectionPolicy = "suggest",
        sinks: Sequence[RecordWriter] = (),
        privacy: int | None = None,
        cohort: int = LEAST_CLIENTS,
        tracebacks: bool | None = None,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        topology: str | None = None,
        host: str = "torch",
        profile: bool = True,
        machine: bool = True,
        capture: Capture | None = None,
        tape: Any = None,
        update_memory: int = 512 << 20,
        strict: bool = False,
        id: str | None = None,  # noqa: A002 - the domain's word
    ) -> None:
        check_parts(sinks, capture, tape)
        policy = policy_for(host, privacy, cohort, tracebacks)
        kit = make_instruments(probes, update_memory)
        chosen = choose_detectors(detectors, false_alarms)
        corrections = correction_policy_of(cure)
        ours = {"probes": kit.preset.name, "detectors": len(chosen), "cure": corrections.described()}
        described = Run(
            id=check_run_id(id) if id else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}",
            name=run,
            host=host,
            topology=topology,
            config={**(config or {}), "fedvitals": {**ours, "false_alarms": false_alarms, **described_policy(policy)}},
            seed=seed,
        )
        self._run = MonitoredRun(
            described,
            store,
            policy,
            kit,
            chosen,
            corrections,
            sinks=[as_sink(sink) for sink in sinks],
            tape=tape,
            capture=capture,
            profile=profile,
            machine=machine,
            strict=strict,
            again=id is not None,
            chosen_privacy=(privacy, cohort, tracebacks),
        )
        self._host = HostObserver(self._run)
        self._corrections = LoopCorrections(self._host)

    @property
    def host(self) -> HostObserver:
        """The `Observer` of this run: what a framework, or a loop with its own transport, calls (docs/hosts.md)."""
        return self._host

    @contextlib.contextmanager
    def round(
        self, number: int, global_model: Any = None, *, held_back: Any = None, loss: Callable[..., Any] | None = None
    ) -> Iterator[Monitor]:
        """Open a round of the federation: metrics and exceptions inside the block belong to it.

        Args:
            number: The round, counted from 0 or 1.
            global_model: The server's model, measured before and after; None if there is none.
            held_back: Samples that no client trains on, in any form that `client(data=...)` accepts. The new global
                model's loss on them is recorded as `held_back.loss`, and that before the first round as
                `initial.held_back.loss`. From these FORGETTING is detected.
            loss: The loss function for these; by default the model's own, or the cross-entropy.

        Returns:
            A context manager that gives this monitor.
        """
        is_first, measures = self._run.last_round is None, held_back is not None and global_model is not None
        self._host.round_begin(number, global_model)
        try:
            if is_first and measures:
                log_held_back(self._host, global_model, held_back, loss, INITIAL)
            yield self
            if measures:
                log_held_back(self._host, global_model, held_back, loss)
        except BaseException as error:
            spine = self._run.spine
            spine.guard.exception(spine.scopes.here(), "round.failed", error)
            self._run.tape.loop.failed(error)
            raise
        finally:
            self._host.round_end(number, global_model)

    @contextlib.contextmanager
    def client(
        self,
        name: AnyName,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002 - found by its parameters
        *,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        group: AnyName | None = None,
    ) -> Iterator[Monitor]:
        """Watch one client's local training: put hooks on the model, and remove them at the end.

        Args:
            name: The client's name; it is taken as text, so 3 and "3" are one client.
            model: The module that trains; None if only time and failures are to be measured.
            optimizer: The optimiser; by default the one that steps the model's parameters is detected.
            data: The client's own samples, to measure how well the model suits them: a DataLoader, a Dataset, a pair
                of tensors or a list of batches.
            loss: The loss function, for the same purpose.
            group: The edge, cluster or ring that the client belongs to; by default the open `edge`.

        Returns:
            A context manager that gives this monitor.
        """
        try:
            with self._run.clients.scope(self._host.open_client(name, model, data, group, loss)):
                yield self
        finally:
            self._run.progress.moved()

    @contextlib.contextmanager
    def edge(self, name: AnyName, model: Any = None) -> Iterator[Monitor]:
        """Open an edge node, cluster or ring: clients that are watched inside the block belong to it.

        Args:
            name: Its name, which becomes the `group` of its clients.
            model: The model that it averages, if there is one to measure.

        Returns:
            A context manager that gives this monitor.
        """
        with self._run.rounds.edge(name, model):
            try:
                yield self
            finally:
                self._run.clients.settle()

    @contextlib.contextmanager
    def part(self, name: str, node: AnyName = "server") -> Iterator[None]:
        """Count the time of a block as «aggregate», «evaluate» or another part of the round (docs/profile.md).

        Args:
            name: What the time goes to.
            node: Who does it.

        Returns:
            A context manager around that work.
        """
        with self._host.part(name, node):
            yield

    def log(self, values: Mapping[str, float] | None = None, /, *, node: AnyName | None = None, **more: float) -> None:
        """Record metrics of your own, for a node, or for the client or the round that is open (or was open last).

        Args:
            values: Numbers by name, for names that are no Python identifiers: {"held_back.loss": 0.3}.
            node: The node that they belong to.
            more: Numbers by name: `monitor.log(accuracy=0.9)`.
        """
        self._host.log(values, node=node, **more)

    def updates(self, round_index: int, updates: Mapping[Any, Any]) -> Sequence[Action]:
        """Measure what each client sent, before it is aggregated. Call it inside the round.

        Call it where updates may change between a client's scope and the aggregation: what arrives is compared with
        what was trained. No model needs to be known.

        Args:
            round_index: The round.
            updates: What each client sent minus the model that it was sent, by client: a sequence of tensors or
                NumPy arrays in the order of `model.parameters()`, a mapping of them by the names of parameters, or
                one flat vector.

        Returns:
            With `cure="auto"`, an action «exclude» for each update that cannot be used, whose `target` is the
            client's name as text; otherwise nothing.
        """
        return self._host.any_updates(round_index, updates)

    def transformed(self, how: str) -> None:
        """State that updates are changed between training and aggregation, and how: «top-k, 1 %», «clipped at 1.0».

        Call it once, before the first round. Detectors that compare an update with the training behind it then stay
        silent. Without this call they stay silent once most clients' updates differ from what was trained.

        Args:
            how: What is done to updates, in your words.
        """
        self._host.event("info", TRANSFORMED, f"Updates are changed on their way: {how}.", data={"stated": how})

    def corrections(self) -> LoopCorrections:
        """Return the corrections of the open round, for the loop to apply before it averages.

            updates, weights = monitor.corrections().apply(updates, weights)

        Changes nothing unless the monitor has `cure="auto"`, and then only what its trials allow (docs/cure.md).

        Returns:
            An object whose `apply(updates, weights)` returns the updates and weights to average.
        """
        self._corrections.ask()
        return self._corrections

    def transfer(
        self,
        sender: AnyName,
        receiver: AnyName,
        bytes: int,  # noqa: A002 - the unit is the name
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        """Record a message between two nodes.

        Args:
            sender: Who sent it.
            receiver: Who received it.
            bytes: Its size as sent.
            raw_bytes: Its size before compression.
            seconds: How long it took.
            kind: «update», «model», or a word of yours.
        """
        self._host.transfer(sender, receiver, bytes, raw_bytes, seconds, kind)

    def exchange(
        self,
        node: AnyName,
        sent: float,
        received: float,
        replied: float,
        returned: float,
        *,
        started: float | None = None,
        span: str | None = None,
    ) -> None:
        """Record when a client elsewhere was asked and when it answered (docs/profile.md). Times are seconds since the
        epoch.

        Args:
            node: The client.
            sent: When the server sent the request, by the server's clock.
            received: When the client received it, by the client's clock; pass `sent` if it does not say.
            replied: When the client sent its answer, by the client's clock; pass `returned` if it does not say.
            returned: When the answer arrived, by the server's clock.
            started: When the process that took the message started, by the client's clock.
            span: The id of the client's span, by which the two sides of the exchange are matched.
        """
        self._host.exchange(node, sent, received, replied, returned, started=started, span=span)

    def findings(self, *, notes: bool = False) -> FindingList:
        """Return the findings so far, worst first. Waits until the detectors have seen everything recorded.

        Args:
            notes: Whether to include findings whose severity was never above «note».

        Returns:
            A list of `fv.Finding`; its `gaps` say what could not be judged.
        """
        complete = self.flush() or self._run.lifecycle.flush(1.0, own=True)
        return self._run.findings.so_far(complete=complete, notes=notes)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything so far is written.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            False if that was not done in time, or something was lost.
        """
        self._run.clients.settle()
        return self._run.lifecycle.flush(timeout)

    def close(self) -> None:
        """End the run: close its scopes, write all records, remove hooks and threads. A second call does nothing."""
        self._run.close()

    @property
    def run(self) -> Run:
        """The run itself: id, name, configuration, versions."""
        return self._run.run

    @property
    def file(self) -> Path | None:
        """The store's file; None if the store is a database, or if there is none."""
        return self._run.outputs.file

    @property
    def lost(self) -> int:
        """How many records any sink has lost so far; the metric `monitor.lost` counts those missing in the store."""
        return self._run.lost.total

    def __repr__(self) -> str:
        return f"<Monitor of run {self.run.name!r}, {self.run.id}: {self._run.progress.rounds} rounds so far>"

    def _repr_html_(self) -> str:
        """What a notebook shows, without waiting for records that are still under way."""
        findings, rounds = self._run.findings.so_far(), self._run.progress.rounds
        count = f"{rounds} round{'s' * (rounds != 1)} so far" if rounds else "waiting for the first round"
        newest = sorted(findings.cases, key=lambda case: (case.last or 0, case.newest.at), reverse=True)[:NEWEST]
        state = "open" if self.run.finished is None else "ended"
        return html.display(
            html.heading(self.run.name, self.run.id, state, count),
            html.paragraph(findings.verdict if rounds else ""),
            html.table(CASE_TITLES, map(case_cells, newest)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
