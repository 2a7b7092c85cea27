# SPDX-License-Identifier: Apache-2.0
"""What recording adds to a run: by the clock, in processor seconds, and to the server's own part of a round.

Three runs of one experiment side by side in one process: without a tape, with one, and with every client's model saved
as it arrives (FedDebug's way). They continue in turn, as many rounds at a time as lie between two whole states of the
tape; pending writes belong to their time. The CNN's tape keeps a whole state every second round, where the default is
every fifth: turns are short, and its cost is rather overstated.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvitals import lab
from fedvitals.lab import federation
from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import Message
from fedvitals.records import AnyName
from fedvitals.replay.tape.tape import Tape
from fedvitals_studies.bench import overhead

Row = dict[str, Any]
Tell = Callable[[str], None]

FOREVER = 1_000_000  # rounds: the benchmark stops when it has seen enough
AGGREGATION = ("receive", "aggregate")  # from an update's arrival to the new model
# The clock; all processors; the server's own part by the clock and in processor time; its thread's processor time.
COSTS = ("wall", "cpu", "own", "own_cpu", "main")
CPU = Path("/proc/{}/schedstat")


@dataclass(frozen=True, slots=True)
class Load:
    """A federation of 100 clients, and how often it is measured."""

    model: str
    optimizer: Any
    pairs: int
    block: int  # rounds per turn, so that each includes its share of whole states

    def experiment(self, clients: int = 100, iterations: int = 20) -> lab.Experiment:
        return lab.Experiment(
            name=f"recording {self.model}",
            dataset="digits",
            model=self.model,
            clients=clients,
            rounds=FOREVER,
            local=lab.Local(iterations=iterations, batch=16, optimizer=self.optimizer),
            evaluation=lab.Evaluation(every=FOREVER + 1),
        )


WORKLOADS: Mapping[str, Load] = {
    "paper_cnn": Load("paper_cnn", lab.adam(), 25, block=2),
    "mlp": Load("mlp", lab.sgd(), 25, block=10),
}
SELDOM = 3  # one turn in this many includes the run that saves every model


class TwoClocks(federation.Stopwatch):
    """A stopwatch of the lab that also adds up the processor time of the server's own part."""

    def start(self) -> None:
        super().start()
        self._processor_seconds, self._processor_at = 0.0, time.thread_time()

    def lap(self, part: str) -> None:
        super().lap(part)
        now = time.thread_time()
        self._processor_seconds += now - self._processor_at if part in AGGREGATION else 0.0
        self._processor_at = now

    def report(self, observer: Any) -> None:
        super().report(observer)
        observer.own_cpu += self._processor_seconds


@contextlib.contextmanager
def two_clocks() -> Iterator[None]:
    """Make federations that are created inside the block use `TwoClocks`."""
    before = federation.Stopwatch
    federation.Stopwatch = TwoClocks  # type: ignore[misc]
    try:
        yield
    finally:
        federation.Stopwatch = before  # type: ignore[misc]


class Listening(HostObserver):
    """An observer that times the server's own part, and the data handed over before and after it."""

    own = own_cpu = 0.0

    def spent(self, part: str, seconds: float, node: AnyName = "server") -> None:
        if part in AGGREGATION:
            self.own += seconds
        super().spent(part, seconds, node)

    @property
    def recorder(self) -> Any:
        began = time.perf_counter(), time.thread_time()
        tape = super().recorder
        return None if tape is None else _Handing(self, tape, began)


class _Handing:
    """A recorder that times what a stopwatch of the lab does not; messages arrive inside of one."""

    def __init__(self, observer: Listening, tape: Any, began: tuple[float, float]) -> None:
        self._observer, self._tape, self._began = observer, tape, began

    def begin(self, *arguments: Any) -> None:
        self._tape.begin(*arguments)
        self._add()

    def end(self, *arguments: Any) -> None:
        self._tape.end(*arguments)
        self._add()

    def _add(self) -> None:
        self._observer.own += time.perf_counter() - self._began[0]
        self._observer.own_cpu += time.thread_time() - self._began[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


class EveryModel(Tape):
    """FedDebug's way: every client's model is saved when it arrives, with its sender. Nothing else is."""

    saved = 0

    def begin(self, *_: Any) -> None: ...
    def end(self, *_: Any) -> None: ...

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        assert self.folder is not None  # noqa: S101 - opened before the first round
        self.folder.mkdir(parents=True, exist_ok=True)
        for message in messages:
            if message.tensors is not None:
                own = {name: tensor.clone() for name, tensor in message.tensors.items()}
                torch.save(own, self.folder / f"{round_index}-{message.node}.pt")
                self.saved += 1


class Arm:
    """One of the runs."""

    def __init__(self, experiment: lab.Experiment, tape: Tape | None, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.tape = tape
        self.monitor = Monitor(folder / "runs.db", experiment.name, host="lab", tape=tape)
        self._observer = Listening(self.monitor.host.monitored)
        self._rounds = lab.rounds(experiment, self._observer)
        self.costs: dict[str, list[float]] = {name: [] for name in (*COSTS, "thread")}

    def block(self, count: int) -> dict[str, float]:
        """Run `count` rounds and return the mean of each cost per round."""
        own, own_cpu, thread = self._observer.own, self._observer.own_cpu, self._thread()
        main, cpu = time.thread_time(), cpu_seconds()
        began = time.perf_counter()
        for _ in range(count):
            next(self._rounds)
        self.monitor.flush()
        if self.tape is not None:
            self.tape.flush()
        wall = time.perf_counter() - began
        spent = {
            "wall": wall,
            "cpu": cpu_seconds() - cpu,
            "own": self._observer.own - own,
            "own_cpu": self._observer.own_cpu - own_cpu,
            "main": time.thread_time() - main,
            "thread": self._thread() - thread,
        }
        return {name: seconds / count for name, seconds in spent.items()}

    def measure(self, count: int) -> None:
        for name, seconds in self.block(count).items():
            self.costs[name].append(seconds)

    def _thread(self) -> float:
        """Return the processor seconds of the tape's own thread, if the system reports them."""
        thread = None if self.tape is None else self.tape._thread  # noqa: SLF001 - nobody else needs to know of it
        if thread is None or thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def close(self) -> None:
        self._rounds.close()  # type: ignore[attr-defined]  # a generator: its processes end here
        self.monitor.close()


def cpu_seconds() -> float:
    """Return the processor seconds of this process and the lab's workers."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(str(CPU).format(child.pid)).read_text(encoding="ascii").split()[0]) / 1e9
    return total


@contextlib.contextmanager
def arms_of(experiment: lab.Experiment, folder: Path, block: int) -> Iterator[dict[str, Arm]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(two_clocks())
        arms = {}
        for name, tape in (("none", None), ("tape", Tape(every=min(5, block))), ("every model", EveryModel())):
            arms[name] = Arm(experiment, tape, folder / name.replace(" ", "-"))
            stack.callback(arms[name].close)
        yield arms


def measured(workload: str, folder: Path, *, quick: bool, tell: Tell) -> Row:
    load = WORKLOADS[workload]
    pairs, block = (2, 1) if quick else (load.pairs, load.block)
    experiment = load.experiment(8, 2) if quick else load.experiment()
    gc.collect()
    with arms_of(experiment, folder, block) as arms:
        for arm in arms.values():  # the first rounds are slow, and are not counted
            arm.block(1 if quick else 2)
        for turn in range(pairs):
            began = time.perf_counter()
            names = ["none", "tape"] if turn % 2 else ["tape", "none"]
            names += ["every model"] if turn % SELDOM == 0 else []
            for name in names:
                arms[name].measure(block)
            seconds = time.perf_counter() - began
            tell(f"{workload}: {turn + 1} of {pairs} pairs of {block} rounds, {seconds:.0f} s; load {_busy():.1f}")
    return {"workload": workload, "pairs": pairs, "rounds": block, **compared(arms)}


def compared(arms: Mapping[str, Arm]) -> Row:
    """Return by how many per cent each is longer than the run without a tape, in the same turns."""
    bare, over = arms["none"].costs, overhead._overhead  # noqa: SLF001 - its own twin
    found: Row = {"busy": _busy()}
    for name, every in (("tape", 1), ("every model", SELDOM)):
        costs = arms[name].costs
        found[name] = {kind: over(bare[kind][::every], costs[kind]) for kind in COSTS}
        found[name] |= {f"{kind}_seconds": float(np.median(costs[kind])) for kind in COSTS}
    seconds = {kind: float(np.median(bare[kind])) for kind in COSTS}
    return {
        **found,
        "round_seconds": seconds["wall"],
        "round_cpu_seconds": seconds["cpu"],
        "aggregation_seconds": seconds["own"],
        "aggregation_cpu_seconds": seconds["own_cpu"],
        "thread_seconds": float(np.median(arms["tape"].costs["thread"])),
        "thread_percent": 100 * float(np.median(arms["tape"].costs["thread"])) / seconds["cpu"],
    }


def _busy() -> float:
    """Return the system's load: other work on the machine makes the figures less reliable."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
