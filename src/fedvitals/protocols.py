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
    """What a schedule may look at when it decides whether a probe measures now."""

    round: int | None
    node: Node | None
    step: int
    seconds_of_step: float  # how long the step before this one took, measuring included
    cost_so_far: float  # seconds that the probe in question has taken in this run


Schedule = Callable[[Moment], bool]
"""Whether to measure at this step: `every(5)`, `first(3)`, `budget(1.0)`, or any function of a `Moment`."""


class Probe(Protocol):
    """Measures a model: a function from a view of it (`probes.view.View`) to numbers by name.

    A number or 0-d array becomes a Metric of that name (`user.*` unless it is in the catalogue); an array [layers,
    columns] becomes LayerStats, so its name must be a family of `stats.FAMILIES`.
    Results stay on the device they were computed on, and may have a leading axis of clients when these are stacked.
    """

    def __call__(self, view: Any, /) -> Mapping[str, Any]:
        """Return what was measured."""
        ...


@runtime_checkable
class PreparedProbe(Protocol):
    """A probe that needs to see the forward or backward pass of a scheduled step: it is prepared before the step."""

    def prepare(self, view: Any, charge: Callable[[Callable[[], None]], None], /) -> Callable[[], Mapping[str, Any]]:
        """Get ready for one step. Returns a function that ends this and gives what was measured.

        Work during the step is passed to `charge`, which runs it and counts its time as the probe's.
        """
        ...


def name_of(part: object) -> str:
    """The name of a user's probe or detector: of the function, or of the object's class."""
    name = getattr(part, "__name__", None)
    return type(part).__name__ if name is None else str(name)


@runtime_checkable
class RecordWriter(Protocol):
    """The least that a user's own sink has. `transport.sink_adapter` makes a `Sink` of it."""

    def write(self, records: Sequence[Record], /) -> None:
        """Take records, in the order in which they were made. What is raised is retried later, but for RecordError."""
        ...


@runtime_checkable
class Sink(RecordWriter, Protocol):
    """Where records go: the store, an exporter, an alert. It may be slow and it may fail: it never sees training.

    Inherit from it: all but `write` have defaults. `name`: for messages; by default the class's. `ignores`: kinds of
    records that are not handed to it. `takes_measurements`: whether `write` takes `Measurements`, too;
    `takes_transfers`: both these and `Transfers`; else it gets the records that they stand for.
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
        """Called once, after the last record, on the thread that wrote."""
        return


@runtime_checkable
class History(Protocol):
    """What has been measured so far, for detectors: read-only; never configuration, faults or truth.

    Implementations in memory and on SQL give the same answers.
    """

    def rounds(self) -> list[int]:
        """Every round with a record, ascending."""
        ...

    def nodes(self) -> list[Node]:
        """Every node with a record, sorted by name (digits by value: c2 before c10)."""
        ...

    def layers(self, family: str) -> tuple[str, ...]:
        """The names of a family's layers, first to last; () when there are none."""
        ...

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        """Each node's newest value of a metric in that round."""
        ...

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        """One node's metric over the rounds (its newest value in each)."""
        ...

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        """One layer's statistic as [rounds × nodes]; NaN where a node took no part."""
        ...

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        """One round's statistics of every node, as [nodes × `layers(family)` × statistics]; NaN where there is none.

        Of each node its newest record of the whole round; those of single steps are left out.
        """
        ...

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        """Events, oldest first; of one name and from one round on where these are given."""
        ...


class Detector(Protocol):
    """A pure function from what was measured up to a round to what is wrong; the same live and on an old store."""

    def __call__(self, history: History, round_index: int, /) -> Iterable[Finding]:
        """Return the findings of a round."""
        ...


Correction = Callable[[Finding, History], Action | None]
"""From a finding to what could be done about it, as data; the host decides and applies."""


@dataclass(frozen=True, slots=True)
class Message:
    """A client's answer, as it arrived at its parent: for a tape."""

    node: Node
    tensors: Mapping[str, Any] | None  # by name; None where nothing came
    weight: float = 0.0  # in the aggregation, as the client told it
    used: bool = True  # whether it is aggregated
    group: str | None = None
    start: str = "model"  # the name of the state that it was trained from
    losses: Any = None  # [steps], of its local batches
    error: str | None = None
    notes: Mapping[str, Any] | None = None  # what else the host wants to be remembered, as JSON


@runtime_checkable
class TapeRecorder(Protocol):
    """What a host hands to a tape, round by round. States are tensors by name, several of them by names of their own.

    All that is handed over is the recorder's: nobody changes it afterwards. It never raises, and all but `gate` never
    wait.
    """

    def describe(self, description: Mapping[str, Any]) -> None:
        """Once, before the first round: what re-executing the run needs, as JSON."""
        ...

    def begin(self, round_index: int, state: Mapping[str, Mapping[str, Any]], notes: Mapping[str, Any]) -> None:
        """All that is known before a round: «model», and whatever the server remembers besides."""
        ...

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        """The clients' answers, as they arrived."""
        ...

    def end(
        self,
        round_index: int,
        state: Mapping[str, Mapping[str, Any]],
        notes: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """All that is known after a round, as in `begin`, and its metrics."""
        ...

    def gate(self, round_index: int) -> None:
        """Between two rounds. The one place that may wait: for a person who debugs, and has asked for it."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """A plain loop, as far as it must be known to run a part of it again. May have an `aggregate` besides:

    aggregate(state, updates, weights) gives the next global state; the others are by node.
    """

    def restore(self, round_index: int, tensors: dict[str, Any], notes: Mapping[str, Any], /) -> Any:
        """The global model as it was before a round, in whatever form `train` begins from; once for each client."""
        ...

    def train(self, node: Node, state: Any, round_index: int, /) -> Any:
        """One client's local training, from there: its state, or a pair of it and the losses of its steps."""
        ...


@runtime_checkable
class RoundObserver(Protocol):
    """The part of an `Observer` by which one is recognised: it has methods alone, so that checking calls none."""

    def round_begin(self, round_index: int, global_state: Any = None) -> None:
        """A round begins. `global_state`: the global model, where the host has it as a module."""
        ...

    def round_end(
        self,
        round_index: int,
        global_state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """A round is over. `metrics`: what the host knows of it, by name."""
        ...


@runtime_checkable
class Observer(RoundObserver, Protocol):
    """What a host (a plain loop, the lab, Flower) tells about a federation as it trains.

    `Monitor.host` is one. A host that has no observer passes `NullObserver()`, which costs nothing.
    """

    @property
    def recorder(self) -> TapeRecorder | None:
        """The tape that wants to have the states themselves; None where there is none."""
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
        """A client begins to train. `group`: its edge, cluster or ring."""
        ...

    def stats(self, node: Node | Sequence[Node], family: str, array: Any) -> None:
        """Statistics that the host computed itself: [layers, columns], or [clients, layers, columns] for many nodes."""
        ...

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        """A client has trained; `outcome` is what its training raised."""
        ...

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """Before a round begins: every correction in force in it; what is not named any more is undone.

        Of kind «checkpoint», where there may be need of one: the host keeps the state as it is now, by the number of
        the round before, and of the older ones those in `keep`. An action with `restore` begins from such a state.
        """
        ...

    def refused(self, action: Action, why: str) -> None:
        """The host cannot apply it: why, as a sentence."""
        ...

    def updates(self, round_index: int, updates: Mapping[Node, Any]) -> Sequence[Action]:
        """Before aggregation: what each client sends. Guards answer whom to «exclude»; the host applies."""
        ...

    def transfer_each(self, messages: Sequence[tuple[Node, Node, int, int, float | None, str]]) -> None:
        """Messages: sender, receiver, bytes, bytes before compression, seconds where known, and kind of each."""
        ...

    def for_worker(self) -> WorkerObserver:
        """An observer for a child process, where clients train: it can be pickled."""
        ...

    def absorb(self, payload: bytes) -> None:
        """What a worker's `payload()` gave, inside the round."""
        ...

    def experiment(self, text: str) -> None:
        """Before the first round: the lab's experiment, with which the run can be run again."""
        ...

    def truth(self, fault: Mapping[str, Any]) -> None:
        """What the host made ill on purpose (kind, nodes, since, until, and how), for trials; no detector sees it."""
        ...

    def expect(self, *nodes: Node) -> None:
        """Whose telemetry should come home in this round: who is missing at its end is told as lost."""
        ...

    def log(self, values: Mapping[str, float], /, *, node: Node | None = None) -> None:
        """Scalars of a node (None: of the round)."""
        ...

    def log_each(self, name: str, values: Mapping[Node, float]) -> None:
        """A scalar of several nodes, by node."""
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
        """A stretch of time that the host knows of: on its own clock where that is a virtual one.

        Gives its id, if it was kept, as the `parent` of what lies inside. `parts`: what it consists of, as in
        `fedvitals.time_parts`.
        """
        ...

    def spent(self, part: str, seconds: float, node: Node = "server") -> None:
        """A node spent so many (real) seconds of this round on a part that is named in `time_parts`; adds up."""
        ...

    def exchange(self, node: Node, sent: float, received: float, replied: float, returned: float) -> None:
        """A client elsewhere was asked and has answered: before `absorb` and `client_end`, as times since the epoch.

        `sent` and `returned` by the server's clock, `received` and `replied` by the client's.
        """
        ...

    def event(
        self, level: str, name: str, message: str, *, node: Node | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Something that happened: a client that dropped out, clusters that merged."""
        ...


@runtime_checkable
class Observed(Protocol):
    """What has an observer for hosts, as a `Monitor` does."""

    @property
    def host(self) -> Observer:
        """The observer that a host calls."""
        ...


def observer_of(observer: Observer | Observed | None) -> Observer:
    """The observer that a host was passed: itself, that of a monitor, or for None one that watches nothing.

    ConfigError where it is none of these.
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
    """What a host tells in a child process. Its records go home as the bytes of `payload()`, after each client."""

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
        """A client begins to train in this process."""
        ...

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        """A client has trained; `outcome` is what its training raised."""
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
        """A message went from one node to another."""
        ...

    def stack_begin(self, stack: Stack) -> None:
        """Clients begin to train as one batch, in place of `client_begin`."""
        ...

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:
        """Before an optimiser step: [clients, weights] and [clients], valid only now."""
        ...

    def stack_end(self, failed: Mapping[Node, BaseException]) -> None:
        """The batch of clients has trained; `failed`: who did not, and why."""
        ...

    def payload(self) -> bytes:
        """Return what was recorded since the last call, as bytes for `Observer.absorb`."""
        ...


class NullObserver:
    """Watches nothing, at no cost; in a worker, too."""

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
