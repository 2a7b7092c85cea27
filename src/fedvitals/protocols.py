# SPDX-License-Identifier: Apache-2.0
"""The interfaces of everything that plugs into fedvitals: probes, schedules, sinks, detectors, corrections, observers.

A user's own probe, schedule, sink or detector is passed in a list; there is no registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedvitals.errors import ConfigError
from fedvitals.records import Action, Event, Finding, Record
from fedvitals.stack import Stack
from fedvitals.stats import Array

Node = str
Rounds = Sequence[int]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a schedule can use to decide whether a probe measures now."""

    round: int | None
    node: Node | None
    step: int
    seconds_of_step: float  # duration of the previous step, including measuring
    cost_so_far: float  # seconds that this probe has taken in this run


Schedule = Callable[[Moment], bool]
"""Whether to measure at this step: `every(5)`, `first(3)`, `budget(1.0)`, or any function of a `Moment`."""


class Probe(Protocol):
    """Measures a model: a function from a view of it (`probes.view.View`) to numbers by name.

    A number or 0-d array becomes a Metric of that name (`user.*` unless it is in the catalogue); an array [layers,
    columns] becomes LayerStats, so its name must be a family of `stats.FAMILIES`.
    Results stay on the device they were computed on, and may have a leading axis of clients when these are stacked.
    """

    def __call__(self, view: Any, /) -> Mapping[str, Any]:
        """Return the measured numbers by name."""
        ...


@runtime_checkable
class PreparedProbe(Protocol):
    """A probe that must see the forward or backward pass of a scheduled step, and is prepared before it."""

    def prepare(self, view: Any, charge: Callable[[Callable[[], None]], None], /) -> Callable[[], Mapping[str, Any]]:
        """Prepare for one step. Returns a function that ends the preparation and returns what was measured.

        Work during the step is passed to `charge`, which runs it and counts its time as the probe's.
        """
        ...


def name_of(part: object) -> str:
    """The name of a user's probe or detector: of the function, or of the object's class."""
    name = getattr(part, "__name__", None)
    return type(part).__name__ if name is None else str(name)


@runtime_checkable
class RecordWriter(Protocol):
    """The minimum that a user's own sink provides. `transport.sink_adapter` turns it into a `Sink`."""

    def write(self, records: Sequence[Record], /) -> None:
        """Accept records, in the order in which they were made. Errors are retried later, except RecordError."""
        ...


@runtime_checkable
class Sink(RecordWriter, Protocol):
    """Receives records: the store, an exporter, an alert. It may be slow or fail; it runs apart from the training.

    Inherit from it: all methods except `write` have defaults. `name`: used in messages; by default the class's.
    `ignores`: kinds of records that it is not given. `takes_measurements`: whether `write` also accepts `Measurements`;
    `takes_transfers`: both these and `Transfers`; otherwise it gets the records that they represent.
    """

    name: str = ""
    ignores: tuple[type, ...] = ()
    takes_measurements: bool = False
    takes_transfers: bool = False

    def prepare(self, folder: Path | None = None, families: Mapping[str, str] | None = None) -> None:
        """Called by the monitor before the first record, with what a sink may need beside the records.

        Args:
            folder: The folder beside the store, in which the sink may keep files; None if the store is no file.
            families: The family of each issue by its code, such as {"LABEL_NOISE": "client"}.
        """
        del folder, families

    def close(self) -> None:
        """Close the sink after the last record, on the thread that wrote."""
        return


@runtime_checkable
class History(Protocol):
    """What has been measured so far, for detectors: read-only, without configuration, planted faults or truth.

    Implementations in memory and on SQL give the same answers.
    """

    def rounds(self) -> list[int]:
        """Return every round with a record, ascending."""
        ...

    def nodes(self) -> list[Node]:
        """Return every node with a record, sorted by name (digits by value: c2 before c10)."""
        ...

    def layers(self, family: str) -> tuple[str, ...]:
        """Return the names of a family's layers, first to last; () if there are none."""
        ...

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        """Return each node's newest value of a metric in that round."""
        ...

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        """Return one node's metric over the rounds (its newest value in each)."""
        ...

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        """Return one layer's statistic as [rounds × nodes]; NaN where a node did not take part."""
        ...

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        """Return one round's statistics of all nodes, as [nodes × `layers(family)` × statistics]; NaN where missing.

        Uses each node's newest record of the whole round; records of single steps are left out.
        """
        ...

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        """Return events, oldest first; optionally of one name, and from one round on."""
        ...


class Detector(Protocol):
    """A pure function from what was measured up to a round to what is wrong; the same live and on a stored run."""

    def __call__(self, history: History, round_index: int, /) -> Iterable[Finding]:
        """Return the findings of a round."""
        ...


Correction = Callable[[Finding, History], Action | None]
"""From a finding to a possible remedy, as data; the host decides and applies it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A client's answer as it arrived at its parent, for a tape."""

    node: Node
    tensors: Mapping[str, Any] | None  # by name; None if nothing arrived
    weight: float = 0.0  # in the aggregation, as claimed by the client
    used: bool = True  # whether it is aggregated
    group: str | None = None
    start: str = "model"  # name of the state that training started from
    losses: Any = None  # [steps], of its local batches
    error: str | None = None
    notes: Mapping[str, Any] | None = None  # whatever else the host wants to keep, as JSON


@runtime_checkable
class TapeRecorder(Protocol):
    """What a host passes to a tape, round by round. A state is a mapping of tensors by name; each state has a name.

    Everything passed belongs to the recorder: nobody may modify it afterwards. It never raises, and no method but
    `gate` ever waits.
    """

    def describe(self, description: Mapping[str, Any]) -> None:
        """Record, once and before the first round, what re-executing the run needs, as JSON."""
        ...

    def begin(self, round_index: int, state: Mapping[str, Mapping[str, Any]], notes: Mapping[str, Any]) -> None:
        """Record everything known before a round: «model», and any other state of the server."""
        ...

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        """Record the clients' answers, as they arrived."""
        ...

    def end(
        self,
        round_index: int,
        state: Mapping[str, Mapping[str, Any]],
        notes: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Record everything known after a round, as in `begin`, and its metrics."""
        ...

    def gate(self, round_index: int) -> None:
        """Called between two rounds. The only method that may wait, for a user who has started the debugger."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """A plain loop, with what is needed to run a part of it again. It may also have an `aggregate`:

    aggregate(state, updates, weights) returns the next global state; updates and weights are by node.
    """

    def restore(self, round_index: int, tensors: dict[str, Any], notes: Mapping[str, Any], /) -> Any:
        """Return the global model before a round, in whatever form `train` starts from; called once for each client."""
        ...

    def train(self, node: Node, state: Any, round_index: int, /) -> Any:
        """Return the result of one client's local training: its state, or a pair of it and the losses of its steps."""
        ...


@runtime_checkable
class RoundObserver(Protocol):
    """The part of an `Observer` used to recognise one: it has only methods, so the check calls nothing."""

    def round_begin(self, round_index: int, global_state: Any = None) -> None:
        """Begin a round. `global_state`: the global model, if the host has it as a module."""
        ...

    def round_end(
        self,
        round_index: int,
        global_state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """End a round. `metrics`: what the host knows about it, by name."""
        ...


@runtime_checkable
class Observer(RoundObserver, Protocol):
    """What a host (a plain loop, the lab, Flower) reports about a federation as it trains.

    `Monitor.host` is one. A host without an observer passes `NullObserver()`, which costs nothing.
    """

    @property
    def recorder(self) -> TapeRecorder | None:
        """The tape that records the states themselves; None if there is none."""
        ...

    def client_begin(
        self,
        node: Node,
        model: Any = None,
        optimizer: Any = None,
        data: Any = None,
        group: str | None = None,
        *,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """Report that a client begins to train. `group`: its edge, cluster or ring."""
        ...

    def stats(self, node: Node | Sequence[Node], family: str, array: Any) -> None:
        """Report statistics computed by the host: [layers, columns], or [clients, layers, columns] for many nodes."""
        ...

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        """Report that a client has trained; `outcome` is the exception that its training raised."""
        ...

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """Return, before a round begins, every correction in force in it; any other is undone.

        An action of kind «checkpoint» is included when one may be needed: the host keeps the current state under the
        number of the round before, and of the older ones those in `keep`. An action with `restore` starts from such a
        state.
        """
        ...

    def refused(self, action: Action, why: str) -> None:
        """Report that the host cannot apply an action, with the reason as a sentence."""
        ...

    def updates(self, round_index: int, updates: Mapping[Node, Any]) -> Sequence[Action]:
        """Report, before aggregation, what each client sent. Returns whom to «exclude», which the host applies."""
        ...

    def transfer_each(self, messages: Sequence[tuple[Node, Node, int, int, float | None, str]]) -> None:
        """Report messages, each as sender, receiver, bytes, bytes before compression, seconds if known, and kind."""
        ...

    def for_worker(self) -> WorkerObserver:
        """Return an observer for a child process in which clients train; it can be pickled."""
        ...

    def absorb(self, payload: bytes) -> None:
        """Accept what a worker's `payload()` returned, within the round."""
        ...

    def experiment(self, text: str) -> None:
        """Report, before the first round, the lab's experiment, from which the run can be repeated."""
        ...

    def truth(self, fault: Mapping[str, Any]) -> None:
        """Record a planted fault (kind, nodes, since, until, and how), for trials; no detector sees it."""
        ...

    def expect(self, *nodes: Node) -> None:
        """Declare whose telemetry should arrive in this round; what is missing at its end is reported as lost."""
        ...

    def log(self, values: Mapping[str, float], /, *, node: Node | None = None) -> None:
        """Record metrics of a node (None: of the round)."""
        ...

    def log_each(self, name: str, values: Mapping[Node, float]) -> None:
        """Record one metric of several nodes, by node."""
        ...

    def span(
        self,
        node: Node | None,
        name: str,
        began: float,
        seconds: float,
        *,
        parent: str | None = None,
        **attributes: Any,
    ) -> str | None:
        """Record a span known to the host, on its own clock if that is virtual.

        Returns its id if it was kept, for use as the `parent` of spans inside it. `parts`: what it consists of, as in
        `fedvitals.time_parts`.
        """
        ...

    def spent(self, part: str, seconds: float, node: Node = "server") -> None:
        """Record that a node spent (real) seconds of this round on a part named in `time_parts`; repeated calls add."""
        ...

    def exchange(self, node: Node, sent: float, received: float, replied: float, returned: float) -> None:
        """Record a completed exchange with a remote client, before `absorb` and `client_end`. Times since the epoch.

        `sent` and `returned` are on the server's clock, `received` and `replied` on the client's.
        """
        ...

    def event(
        self, level: str, name: str, message: str, *, node: Node | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Record an event, such as a client that dropped out or clusters that merged."""
        ...


@runtime_checkable
class Observed(Protocol):
    """Anything with an observer for hosts, such as a `Monitor`."""

    @property
    def host(self) -> Observer:
        """The observer that a host calls."""
        ...


def observer_of(observer: Observer | Observed | None) -> Observer:
    """Return the observer for what a host was passed: itself, a monitor's, or for None one that watches nothing.

    ConfigError if it is none of these.
    """
    if observer is None:
        return NullObserver()
    if isinstance(observer, Observed):
        return observer.host
    if not isinstance(observer, RoundObserver):
        raise ConfigError(f"The observer is a fv.Monitor('runs.db') or the like; got {observer!r}.")
    return observer


@runtime_checkable
class WorkerObserver(Protocol):
    """What a host reports in a child process. Its records return as the bytes of `payload()`, after each client."""

    def client_begin(
        self,
        node: Node,
        model: Any = None,
        optimizer: Any = None,
        data: Any = None,
        group: str | None = None,
        *,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """Report that a client begins to train in this process."""
        ...

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        """Report that a client has trained; `outcome` is the exception that its training raised."""
        ...

    def transfer(
        self,
        sender: Node,
        receiver: Node,
        bytes: int,  # noqa: A002
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        """Record a message between two nodes."""
        ...

    def stack_begin(self, stack: Stack) -> None:
        """Report that clients begin to train as one batch, in place of `client_begin`."""
        ...

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:
        """Measure before an optimiser step: [clients, weights] and [clients], valid only during the call."""
        ...

    def stack_end(self, failed: Mapping[Node, BaseException]) -> None:
        """Report that the batch of clients has trained; `failed`: the clients that failed, and why."""
        ...

    def payload(self) -> bytes:
        """Return what was recorded since the last call, as bytes for `Observer.absorb`."""
        ...


class NullObserver:
    """Watches nothing, at no cost, in a worker as well."""

    recorder: TapeRecorder | None = None

    def round_begin(self, *_: Any, **__: Any) -> None: ...
    def client_begin(self, *_: Any, **__: Any) -> None: ...
    def stats(self, *_: Any, **__: Any) -> None: ...
    def client_end(self, *_: Any, **__: Any) -> None: ...
    def prescribed(self, *_: Any) -> Sequence[Action]:
        return ()

    def refused(self, *_: Any) -> None: ...
    def updates(self, *_: Any, **__: Any) -> Sequence[Action]:
        return ()

    def transfer(self, *_: Any, **__: Any) -> None: ...
    def transfer_each(self, messages: Sequence[tuple[Any, ...]]) -> None:
        for message in messages:
            self.transfer(*message)

    def round_end(self, *_: Any, **__: Any) -> None: ...
    def for_worker(self) -> WorkerObserver:
        return self

    def absorb(self, *_: Any) -> None: ...
    def experiment(self, *_: Any) -> None: ...
    def truth(self, *_: Any) -> None: ...
    def expect(self, *_: Any) -> None: ...
    def log(self, *_: Any, **__: Any) -> None: ...
    def log_each(self, *_: Any) -> None: ...
    def span(self, *_: Any, **__: Any) -> str | None:
        return None

    def spent(self, *_: Any, **__: Any) -> None: ...
    def exchange(self, *_: Any, **__: Any) -> None: ...
    def event(self, *_: Any, **__: Any) -> None: ...
    def stack_begin(self, *_: Any) -> None: ...
    def stack_step(self, *_: Any) -> None: ...
    def stack_end(self, *_: Any) -> None: ...
    def payload(self) -> bytes:
        return b""
