# SPDX-License-Identifier: Apache-2.0
"""Tapes for tests of what people are shown: a run of the lab that falls ill, and one written by hand, of any names."""

import uuid
from pathlib import Path

import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.measurements import stamped
from fedvitals.protocols import Message
from fedvitals.records import Metric, Record, Run, Where
from fedvitals.store import open_store, spill_folder

ROUNDS, CLIENTS = 7, 6
FAILS, NOISY = "c2", "c4"


def recorded(store: Path) -> str:
    """A run on digits, whose c2 fails in round 4 and whose c4 has wrong labels; whole states every 3 rounds."""
    faults = [lab.label_noise(nodes=[NOISY], rate=0.9), lab.crash(nodes=[FAILS], since=4, until=4)]
    plan = lab.Experiment(dataset="digits", model="mlp", clients=CLIENTS, rounds=ROUNDS, faults=faults, seed=3)
    with fv.Monitor(store, run="taped", host="lab", tape=fv.Tape(every=3)) as monitor:
        lab.run(plan, monitor, workers=1)
    return monitor.run.id


def written(store: Path, run: str, nodes: list[str], rounds: int = 3, *, name: str = "", **how: object) -> Path:
    """Of a loop: each client sends the model plus its own number; all updates of the last round are whole.

    `left_out` and `failed`: of nodes; `layers`: names. Gives the tape's folder.
    """
    described = Run(id=run, name=name or run, host=str(how.get("host", "torch")))
    told = [Metric(Where(run, number), float(number), "accuracy", 0.5 + number / 10) for number in range(rounds)]
    stored(store, described, *told)
    tape = fv.Tape(every=2)
    tape.open(spill_folder(store), described, lambda *_: None)
    tape.describe({})
    model = state(0.0, how.get("layers"))
    for number in range(rounds):
        tape.begin(number, {"model": model}, {"clock": float(number).hex(), "actions": how.get("actions", [])})
        tape.messages(number, [_message(i, node, model, how) for i, node in enumerate(nodes)])
        model = {layer: values + 1 for layer, values in model.items()}
        tape.end(number, {"model": model}, {"clock": float(number + 1).hex()}, {"accuracy": 0.5 + number / 10})
    folder = tape.folder
    tape.close()
    assert folder is not None
    return folder


def stored(store: Path, *records: Record) -> None:
    """Into the store, as if a monitor had sent them."""
    sink = open_store(store)
    source = uuid.uuid4().hex
    sink.write([stamped(record, source, i) for i, record in enumerate(records)])
    sink.close()


def state(value: float, layers: object = None) -> dict[str, torch.Tensor]:
    names = list(layers) if isinstance(layers, list | tuple) else ["w", "b"]
    return {name: torch.full((4 + i,), value) for i, name in enumerate(names)}


def _message(place: int, node: str, model: dict[str, torch.Tensor], how: dict[str, object]) -> Message:
    if node in how.get("failed", ()):  # type: ignore[operator]
        return Message(node, None, 1.0, error="it broke: " + node)
    sent = {layer: values + 1.0 + place for layer, values in model.items()}
    used = node not in how.get("left_out", ())  # type: ignore[operator]
    return Message(node, sent, float(10 + place), used, losses=torch.tensor([2.0, 1.0 + place]))
