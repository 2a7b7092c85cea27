# SPDX-License-Identifier: Apache-2.0
"""A small real training that something happens to, and the proof that it did not notice."""

from __future__ import annotations

import copy
import os
import subprocess
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.transport import queue
from support.conditions import holds_for_each
from support.models import make_data, mlp

ROUNDS, CLIENTS = 6, 3


def train(monitor=None, after=lambda number: None):
    """Six rounds of three clients; what may not differ: the weights, and the state of the random numbers."""
    torch.manual_seed(7)
    shared = mlp()
    x, y = make_data(30, 7)
    for number in range(ROUNDS):
        if monitor:
            monitor.host.round_begin(number, shared)
        states = []
        for c in range(CLIENTS):
            model = copy.deepcopy(shared)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            if monitor:
                monitor.host.client_begin(f"c{c}", model, optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
                optimizer.step()
            if monitor:
                monitor.host.client_end(f"c{c}")
            states.append(model.state_dict())
        shared.load_state_dict({key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]})
        if monitor:
            monitor.host.round_end(number, shared)
        after(number)
    return [*shared.state_dict().values(), torch.get_rng_state()]


def suffer(store, happens, monkeypatch, name="ill"):
    """Train with something happening after each round; the rounds that were acknowledged, and the monitor.

    Bit for bit the training that nobody watched.
    """
    monkeypatch.setattr(queue, "PATIENCE", 1)  # so that a flush gives up soon; the training does not wait in any case
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    healthy = train()
    acknowledged = []
    monitor = fv.Monitor(store, name, probes="deep")

    def after(number):
        if monitor.flush(5):
            acknowledged.append(number)
        happens(number)

    watched = train(monitor, after)
    monitor.close()
    assert holds_for_each(torch.equal(a, b) for a, b in zip(healthy, watched, strict=True))
    return acknowledged, monitor


def check(store, run, rounds):
    """Everything that these rounds of the run must have is there, and nothing twice."""
    with open_reader(store) as reader:
        assert queries.get_run(reader, run).name
        history = reader.history(run)
        for number in rounds:
            assert list(history.latest("gradient.norm", number)) == [f"c{c}" for c in range(CLIENTS)]
        ((rows, distinct),) = reader.database.rows(
            "SELECT COUNT(*), COUNT(DISTINCT sequence) FROM metrics WHERE run = ?", (run,)
        )
        assert rows == distinct
        if rounds:
            seen, nodes, matrix = history.matrix("gradient", "l2", "0.weight")
            assert set(rounds) <= set(seen)
            assert len(nodes) == CLIENTS
            assert (matrix[[seen.index(number) for number in rounds]] > 0).all()


@contextmanager
def mounted(folder, *options):
    """A file system of its own at the folder; skips where the tests may not mount."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system that can be full or read-only")
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    try:
        yield lambda option: subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
