# SPDX-License-Identifier: Apache-2.0
"""The processes that are killed: trainers that acknowledge each round once it is written, and readers.

A trainer is killed together with everything it has not written yet. The round's number is sent through a pipe after
`flush` has returned True, so that the parent knows which rounds must be found afterwards.
"""

from __future__ import annotations

import itertools
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import fedvitals as fv
from fedvitals.errors import FedvitalsError
from fedvitals.records import Metric
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.upkeep import compaction

CLIENTS, STEPS = 3, 2


def train(store: str, run: str, tape: bool, rounds: range | None, acknowledged: Connection) -> None:
    """Train a small monitored federation for these rounds or, if there are none, until killed."""
    torch.set_num_threads(1)
    compaction.CHUNK_ROUNDS = 4  # so that some of the kills happen during a compaction
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    with fv.Monitor(store, id=run, tape=fv.Tape(every=3) if tape else None) as monitor:
        for number in rounds or itertools.count():
            _round(monitor, model, number)
            if monitor.flush():
                acknowledged.send(number)


def _round(monitor: fv.Monitor, model: nn.Module, number: int) -> None:
    with monitor.round(number, model):
        for index in range(CLIENTS):
            local = nn.Linear(8, 3)
            local.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), 0.1)
            with monitor.client(f"c{index}", local, optimizer):
                for _ in range(STEPS):
                    loss = nn.functional.cross_entropy(local(torch.randn(4, 8)), torch.randint(0, 3, (4,)))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                monitor.log(loss=float(loss.detach()))


def read(store: str, run: str, seed: int) -> None:
    """Read the store repeatedly, until killed: with a new reader each time, or several times with one."""
    chance = random.Random(seed)  # noqa: S311 - no secrets here
    while True:
        try:
            with open_reader(store) as reader:
                for _ in range(chance.randint(1, 5)):
                    queries.newest_rounds(reader, run, 3)
        except FedvitalsError:
            pass  # does not exist yet, or its server is being started
        time.sleep(chance.uniform(0, 0.1))


def missing_records(store: str, run: str, acknowledged: list[int]) -> list[str]:
    """Return the acknowledged rounds that a store lacks, and what it contains twice."""
    wanted: set[tuple[int | None, str | None, str]] = {(number, None, "time.round") for number in acknowledged}
    wanted |= {(number, f"c{c}", name) for number in acknowledged for c in range(CLIENTS) for name in ("loss", "steps")}
    with open_reader(store) as reader:
        metrics = queries.records(reader, run, Metric)
        rounds, nodes, _ = reader.history(run).matrix("update", "l2", "weight")
    stored = {(m.where.round, m.where.node, m.name) for m in metrics}
    twice = len(metrics) - len({(m.source, m.sequence) for m in metrics})
    lost = [f"{name} of {node or 'round'} in round {number}" for number, node, name in sorted(wanted - stored, key=str)]
    lost += [f"the update's statistics of round {number}" for number in sorted({*acknowledged} - {*rounds})]
    if acknowledged and len(nodes) < CLIENTS:
        lost.append(f"statistics of {CLIENTS - len(nodes)} clients")
    return lost + ([f"{twice} metrics are there twice"] if twice else [])


def missing_from_tape(store: str, run: str, acknowledged: list[int]) -> list[str]:
    """Return the acknowledged rounds that a tape lacks, or cannot read."""
    from fedvitals.replay.tape.reader import open_tape  # noqa: PLC0415 - only where there is a tape

    tape, lost = open_tape(Path(store), run), []
    for number in acknowledged:
        try:
            tape.entry(number)
        except FedvitalsError as error:
            lost.append(f"round {number} of the tape: {error}")
    return lost
