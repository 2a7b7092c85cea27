# SPDX-License-Identifier: Apache-2.0
"""A real federation that is slow on purpose: a server and four client processes on loopback sockets.

The line is throttled by its sender, processes are stopped and resumed many times a second (a CPU quota from outside),
data sets, averaging and testing sleep, a client's clock is an hour wrong. The verdict on each is taken from the store.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from fedvitals.lab.data import datasets
from fedvitals.monitor.monitor import Monitor
from fedvitals_studies.bottlenecks.client import Habits, load_state, new_model, state_of
from fedvitals_studies.bottlenecks.wire import receive, send

CLIENT = "fedvitals_studies.bottlenecks.client"
PROBES = "standard"  # «light» does not report what a client's steps consist of
CLIENTS, ROUNDS = 4, 3
SLOW = "c2"  # if only one is slow
BYTES_PER_SECOND = 60_000  # of a throttled line: about 0.7 s for the model of 40 KB
LOADING_SECONDS = 0.0025  # of a slow sample, 256 of them
QUOTA = 0.1  # of a core
TURN = 0.02  # seconds between two stops of a process
EPOCHS = 10  # if there is much to compute; 1 otherwise
PAUSE = 0.6  # seconds that averaging or testing takes, if it is slow
HOUR = 3600.0
PATIENCE = 60.0  # seconds until a silent client is given up
NODES = tuple(f"c{place}" for place in range(CLIENTS))


@dataclass(frozen=True, slots=True)
class RealPlant:
    """A federation, and the correct verdict on it."""

    name: str
    kind: str  # of verdict.KINDS
    bound_by: str | None = None  # what makes the straggler slow
    stragglers: tuple[str, ...] = ()
    habits: Mapping[str, Habits] = field(default_factory=dict)  # of clients that differ from the usual
    download: Mapping[str, float] = field(default_factory=dict)  # client → bytes per second that it receives
    quota: tuple[str, ...] = ()  # clients with only a share of a core
    pauses: Mapping[str, float] = field(default_factory=dict)  # seconds, of the server's parts


def real_plants() -> list[RealPlant]:
    """Return fourteen cases; the same trouble for all clients is a bottleneck, for one of them a straggler."""
    slow: dict[str, Any] = {"stragglers": (SLOW,)}
    throttled, loading = Habits(upload_bytes_per_second=BYTES_PER_SECOND), Habits(loading_seconds=LOADING_SECONDS)
    some, busy = dict.fromkeys(NODES, Habits(epochs=2)), Habits(epochs=EPOCHS)
    return [
        RealPlant("throttled downloads", "download", download=dict.fromkeys(NODES, BYTES_PER_SECOND)),
        RealPlant("throttled uploads", "upload", habits=dict.fromkeys(NODES, throttled)),
        RealPlant("one throttled download", "straggler", "download", **slow, download={SLOW: BYTES_PER_SECOND}),
        RealPlant("one throttled upload", "straggler", "upload", **slow, habits={SLOW: throttled}),
        RealPlant("a tenth of a core each", "compute", quota=NODES, habits=some),
        RealPlant("a tenth of a core for one", "straggler", "compute", **slow, quota=(SLOW,), habits=some),
        RealPlant("ten times the epochs", "compute", habits=dict.fromkeys(NODES, busy)),
        RealPlant("slow data sets", "data loading", habits=dict.fromkeys(NODES, loading)),
        RealPlant("one slow data set", "straggler", "data loading", **slow, habits={SLOW: loading}),
        RealPlant("slow aggregation", "aggregation", pauses={"aggregate": PAUSE}),
        RealPlant("slow evaluation", "server", pauses={"evaluate": PAUSE}),
        RealPlant("updates checked slowly", "server", pauses={"receive": PAUSE}),
        RealPlant(
            "throttled uploads, a clock one hour ahead",
            "upload",
            habits={**dict.fromkeys(NODES, throttled), SLOW: Habits(1, 0.0, BYTES_PER_SECOND, HOUR)},
        ),
        RealPlant(
            "one slow data set, its clock one hour behind",
            "straggler",
            "data loading",
            **slow,
            habits={SLOW: Habits(1, LOADING_SECONDS, None, -HOUR)},
        ),
    ]


class RealFederation:
    """Client processes that are kept between plants; `with` starts and ends them."""

    def __init__(self) -> None:
        self._case = 0
        self._lines: dict[str, socket.socket] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        digits = datasets.load("digits")
        self._test = digits.test_x, digits.test_y

    def __enter__(self) -> Self:
        token = secrets.token_hex(16)  # so that no other process on this machine can take part
        with socket.create_server(("127.0.0.1", 0)) as door:
            door.settimeout(PATIENCE)
            try:
                for place, node in enumerate(NODES):
                    own = [sys.executable, "-m", CLIENT, str(place), str(door.getsockname()[1])]
                    self._processes[node] = subprocess.Popen(own, stdin=subprocess.PIPE)  # noqa: S603 - our own module
                    self._write(node, f"{token}\n".encode())
                while len(self._lines) < CLIENTS:
                    self._let_in(door, token)
            except BaseException:
                self.close()
                raise
        self._warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_in(self, door: socket.socket, token: str) -> None:
        line, _ = door.accept()
        line.settimeout(PATIENCE)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello, _ = receive(line)
        node = f"c{hello.get('place')}"
        if secrets.compare_digest(str(hello.get("token")), token) and node in NODES:
            self._lines[node] = line
        else:
            line.close()

    def _warm_up(self) -> None:
        """Run a first round that is not recorded: loading on first use takes seconds."""
        with Monitor(None, probes=PROBES, detectors=(), machine=False, strict=True) as monitor:
            self._rounds(monitor, RealPlant("warm-up", "nothing"), 1)

    def close(self) -> None:
        """End the clients, by closing the connection."""
        for line in self._lines.values():
            line.close()
        for process in self._processes.values():
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, plant: RealPlant, store: str | Path, rounds: int = ROUNDS) -> str:
        """Train for some rounds with this trouble planted. Returns the run's id."""
        with Monitor(store, run=plant.name, probes=PROBES, detectors=(), machine=False, strict=True) as monitor:
            self._rounds(monitor, plant, rounds)
        return monitor.run.id

    def _rounds(self, monitor: Monitor, plant: RealPlant, rounds: int) -> None:
        self._case += 1
        model = new_model()
        for node in NODES:
            self._write(node, pickle.dumps((monitor.host.for_worker(), plant.habits.get(node, Habits()))))
        with _quota([self._processes[node].pid for node in plant.quota]):
            for number in range(rounds):
                self._round(monitor, number, model, plant)

    def _write(self, node: str, message: bytes) -> None:
        pipe = self._processes[node].stdin
        assert pipe is not None  # noqa: S101 - opened above
        pipe.write(message)
        pipe.flush()

    def _round(self, monitor: Monitor, number: int, model: nn.Module, plant: RealPlant) -> None:
        state = state_of(model)
        states: list[bytes] = []
        with monitor.round(number, model), ThreadPoolExecutor(CLIENTS) as pool:
            monitor.host.expect(*NODES)
            under_way = {pool.submit(self._ask, node, number, state, plant.download.get(node)): node for node in NODES}
            for done in as_completed(under_way):
                node = under_way[done]
                sent, told, body, returned = done.result()
                monitor.exchange(node, sent, told["received"], told["replied"], returned)
                monitor.host.absorb(body[told["state"] :])
                monitor.transfer("server", node, len(state), kind="model")
                monitor.transfer(node, "server", told["state"])
                states.append(body[: told["state"]])
            with monitor.part("receive"):
                time.sleep(plant.pauses.get("receive", 0.0))
            with monitor.part("aggregate"):
                _average(model, states)
                time.sleep(plant.pauses.get("aggregate", 0.0))
            with monitor.part("evaluate"):
                monitor.log(accuracy=self._accuracy(model))
                time.sleep(plant.pauses.get("evaluate", 0.0))

    def _ask(
        self, node: str, number: int, state: bytes, pace: float | None
    ) -> tuple[float, dict[str, Any], bytes, float]:
        line = self._lines[node]
        sent = time.time()
        send(line, {"case": self._case, "round": number}, state, pace)
        told, body = receive(line)
        return sent, told, body, time.time()

    def _accuracy(self, model: nn.Module) -> float:
        x, y = self._test
        with torch.no_grad():
            return float((model(x).argmax(1) == y).double().mean())


def _average(model: nn.Module, states: Sequence[bytes]) -> None:
    mean = np.mean([np.frombuffer(state, "<f4") for state in states], axis=0, dtype=np.float64)
    load_state(model, mean.astype("<f4").tobytes())


@contextlib.contextmanager
def _quota(processes: Sequence[int]) -> Iterator[None]:
    """Limit these processes to a share of a core inside the block, by stopping and resuming them from outside."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            _signal(processes, signal.SIGSTOP)
            over.wait((1 - QUOTA) * TURN)
            _signal(processes, signal.SIGCONT)
            over.wait(QUOTA * TURN)

    holding = threading.Thread(target=hold, daemon=True)
    if processes:
        holding.start()
    try:
        yield
    finally:
        over.set()
        if processes:
            holding.join()
            _signal(processes, signal.SIGCONT)


def _signal(processes: Sequence[int], which: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, which)
