# SPDX-License-Identifier: Apache-2.0
"""A federation whose events are known beforehand: which client fails, answers late, never answers, or lies.

`check_host` lets a host run such federations and then examines what the store has recorded. A federation is plain data,
so that it can be sent to the processes of a host; events in these are noted in files of its folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedvitals.measurements import run_of, single_records, stamped
from fedvitals.records import Event, Metric, Record, Run, Where
from fedvitals.transport.wire.payload import decode, encode

Trouble = Literal["fails", "late", "lost"]
Weights = Mapping[str, npt.NDArray[Any]]
SHAPES = {"dense.weight": (6, 4), "dense.bias": (4,), "head.weight": (4, 3)}
RATE, SPREAD = 0.3, 0.3  # how far a client moves to its target in a round, and how far apart targets are
FORGED_VALUE, FORGED_NAME = 66613.0, "user.forged"  # identify a lie in the store
FORKED_WORDS = "logged by a process that was forked off the server"
FORK_SECONDS = 30.0  # within which a forked process must have ended
WAIT_SECONDS = 60.0  # for which a client waits for a round at most


class ScriptedError(Exception):
    """Raised by `ScriptedFederation.train` for a client that is scripted to fail."""


@dataclass(frozen=True, slots=True)
class ScriptedFederation:
    """What happens in which round of a small federation; `check_host` passes it to a host.

    Args:
        name: The name of the federation, and of its run.
        clients: The names by which the host's server knows the clients.
        rounds: The number of rounds, which are counted from 0.
        folder: Where its processes write notes, by which `check_host` learns what happened.
        troubles: Tuples (round, client, trouble): a client that «fails» raises while it trains, the answer of a «late»
            one arrives after the round, and that of a «lost» one never arrives.
        liar: The client that sends forged telemetry.
        slow: The client that is asked in the first round, while the others continue, and whose answer is used in the
            last round.
        forks_in: The round in which the server's process forks.
    """

    name: str
    clients: tuple[str, ...]
    rounds: int
    folder: str
    troubles: tuple[tuple[int, str, Trouble], ...] = ()
    liar: str | None = None
    slow: str | None = None
    forks_in: int | None = None

    def to_json(self) -> str:
        """Return the federation as text, for a process or machine whose arguments are text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptedFederation:
        """Return the federation that `to_json` wrote.

        Args:
            text: What `to_json` returned.
        """
        fields = json.loads(text)
        troubles = tuple((round_index, node, trouble) for round_index, node, trouble in fields["troubles"])
        return cls(**{**fields, "clients": tuple(fields["clients"]), "troubles": troubles})

    # -- for the clients ----------------------------------------------------------------------------------------------

    def trouble(self, round_index: int, node: str) -> Trouble | None:
        """Return what goes wrong with a client in a round: «fails», «late», «lost», or None.

        Args:
            round_index: The round.
            node: The client.
        """
        return next((trouble for at, who, trouble in self.troubles if (at, who) == (round_index, node)), None)

    def train(self, round_index: int, node: str, weights: Weights) -> dict[str, npt.NDArray[Any]]:
        """Return a client's weights after its training.

        Args:
            round_index: The round.
            node: The client.
            weights: The weights that the client was sent, arrays by name.

        Returns:
            The trained weights, arrays by name.

        Raises:
            ScriptedError: The client is scripted to fail in this round.
        """
        if self.trouble(round_index, node) == "fails":
            raise ScriptedError(f"{node} fails in round {round_index}, as it is to")
        stream = np.random.default_rng([self.clients.index(node), round_index])
        target = {name: 1 + SPREAD * stream.normal(size=values.shape) for name, values in weights.items()}
        return {name: (values + RATE * (target[name] - values)).astype(np.float32) for name, values in weights.items()}

    def telemetry(self, round_index: int, node: str, payload: bytes) -> bytes:
        """Return what a client sends as its telemetry: its payload unchanged, or a forged one if the client lies.

        Args:
            round_index: The round.
            node: The client.
            payload: What its `worker.payload()` returned.
        """
        if node != self.liar or not payload:
            return payload
        other = next(name for name in self.clients if name != node)
        own = [*single_records(decode(payload))]
        run = run_of(own[0])
        here, there = Where(run, None, node), Where(run, None, other)
        lies: tuple[list[Record], ...] = (
            [Metric(there, 1.0, FORGED_NAME, FORGED_VALUE), Event(there, 1.0, "error", "client.failed", FORGED_NAME)],
            [Metric(here, 1.0, "time.round", FORGED_VALUE), Metric(here, 1.0, "clients.failed", FORGED_VALUE)],
            [Run("another-run", FORGED_NAME), Metric(Where("another-run", 0, other), 1.0, "loss", FORGED_VALUE)],
            [Event(here, 1.0, "info", "cohort", FORGED_NAME, {"phase": "train", "late": [other], "asked": [other]})],
        )
        if round_index % (len(lies) + 1) == len(lies):
            return payload[:-7]
        forged = [stamped(lie, f"lies-{round_index}", i) for i, lie in enumerate(lies[round_index % (len(lies) + 1)])]
        return encode([*own, *forged])

    def answers(self, round_index: int, node: str) -> bool:
        """Wait until a client's answer to a round is due.

        For clients with a thread or a process of their own; others look at `trouble` and `slow` themselves.

        Args:
            round_index: The round.
            node: The client.

        Returns:
            True when the answer is due; False if the client must never answer.
        """
        trouble = self.trouble(round_index, node)
        if trouble == "late":
            self._await_round(round_index + 1)
        elif node == self.slow and round_index == 0:
            self._await_round(self.rounds - 1)
        return trouble != "lost"

    def _await_round(self, round_index: int) -> None:
        """Wait until the server is in this round."""
        until = time.monotonic() + WAIT_SECONDS
        while round_index not in [note["round"] for note in self.notes("round")] and time.monotonic() < until:
            time.sleep(0.02)

    # -- for the server -----------------------------------------------------------------------------------------------

    def model(self) -> dict[str, npt.NDArray[Any]]:
        """Return the weights that the federation begins with, arrays by name."""
        stream = np.random.default_rng(0)
        return {name: stream.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}

    def average(self, weights: Iterable[Weights]) -> dict[str, npt.NDArray[Any]]:
        """Return the mean of the clients' weights, arrays by name.

        Args:
            weights: What each client has trained.
        """
        every = [*weights]
        return {name: np.stack([own[name] for own in every]).mean(0, dtype=np.float32) for name in every[0]}

    def took(self, round_index: int, node: str) -> None:
        """Note that the server has used a client's answer in its model.

        Args:
            round_index: The round.
            node: The client.
        """
        self.note("took", round=round_index, node=node)

    def in_round(self, round_index: int, close: Callable[[], None]) -> None:
        """Say that a round has begun; the server's process calls this in each round.

        If the script says so, the process forks here; the child logs a line, calls `close`, and ends.

        Args:
            round_index: The round.
            close: Ends the monitoring, such as `monitor.close`.
        """
        self.note("round", round=round_index)
        if round_index != self.forks_in or not hasattr(os, "fork"):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about a process with threads, as every server has
            child = os.fork()
        if child == 0:
            try:
                logging.getLogger("federation").error(FORKED_WORDS)
                close()
            finally:
                os._exit(0)
        self.note("forked", outcome=_outcome_of(child))

    def at_end(self, close: Callable[[], None]) -> None:
        """Say that the last round is over; the server's process calls this. It closes twice, and notes the result.

        Args:
            close: Ends the monitoring, such as `monitor.close`.
        """
        try:
            close()
            close()
        except Exception as error:  # noqa: BLE001 - the check reports it
            self.note("closed", error=f"{type(error).__name__}: {error}")
        else:
            self.note("closed", error=None)

    # -- notes --------------------------------------------------------------------------------------------------------

    def note(self, kind: str, **fields: Any) -> None:
        """Add a note to the federation's folder, from any process.

        Args:
            kind: What is noted, such as «round».
            fields: Plain values that belong to it.
        """
        with (Path(self.folder) / f"{self.name}.notes").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Return the notes of a kind, in the order in which they were made.

        Args:
            kind: What was noted, such as «round».
        """
        file = Path(self.folder) / f"{self.name}.notes"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [note for note in map(json.loads, lines) if note["kind"] == kind]


def _outcome_of(child: int) -> str:
    """Wait for a forked process; return whether it «ended» or «hung», which ends it."""
    until = time.monotonic() + FORK_SECONDS
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return "ended"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"
