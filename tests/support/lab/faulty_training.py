# SPDX-License-Identifier: Apache-2.0
"""A small training without an engine, at whose every place a fault can act: what came of each of them."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.tasks import Update
from fedvitals.lab.faults import language
from fedvitals.lab.faults import table as ill
from fedvitals.lab.faults.fault import RunFault
from fedvitals.lab.local import Local
from fedvitals.lab.network.virtual_clock import Journey
from fedvitals.lab.state import StateLayout

NODES = tuple(f"c{index}" for index in range(6))
CLASSES, STEPS = 5, 3
GRADIENT = 1.001  # which float16 rounds


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


LAYOUT = StateLayout.of(model())


class Past:
    """A server that has come `rounds` rounds far, each model a little further on; it averages."""

    weights = LAYOUT.weights
    server_learning_rate = 1.0

    def __init__(self, rounds: int = 10) -> None:
        stream = torch.Generator().manual_seed(1)
        steps = torch.randn(rounds + 1, LAYOUT.size, generator=stream) * 0.01
        self.models = LAYOUT.flat(model()) + steps.cumsum(0)

    def model(self, rounds_ago: int):
        return self.models[-1 - rounds_ago] if rounds_ago < len(self.models) else None

    def aggregate(self, updates):
        return torch.stack([update.state for update in updates]).mean(0)


def data():
    stream = torch.Generator().manual_seed(2)
    return torch.rand(60, 8, generator=stream), torch.randint(0, CLASSES, (60,), generator=stream)


def updates(past: Past) -> list[Update]:
    """What honest clients of a cohort send."""
    start = past.models[-1]
    made = []
    for place, node in enumerate(NODES):
        change = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(100 + place)) * 0.1
        made.append(Update(node, start + change, start, samples=50 + place))
    return made


class Settings(msgspec.Struct, frozen=True):
    """As much of an experiment as a fault of the whole may change."""

    faults: tuple = ()
    local: Local = Local(iterations=STEPS)
    partition: object = None


# Those of language models need tokens and adapters: test_language.py.
KINDS = {kind_of(kind.__name__): kind for kind in ill.FAULTS if kind not in language.FAULTS}
MORE = {
    "memory_hog": {"fatal": True, "megabytes": 1},
    "distributed_backdoor": {"nodes": ["c1", "c3"]},
    "optimal_little_is_enough": {"evaluations": 2},
    "optimal_inner_product": {"evaluations": 2},
}  # settings with which it shows in `outcome`


def fault_of(kind, **settings):
    cls = KINDS[kind]
    own = {} if issubclass(cls, RunFault) or kind.startswith("server") else {"nodes": ["c1"]}
    return cls(**{**own, **MORE.get(kind, {}), **settings})


def first_model(fault):
    found = model()
    state = LAYOUT.flat(found)
    ill.apply_initial([fault], LAYOUT.views(state), 7)
    LAYOUT.load(found, state)
    return found


def bits(value):
    """Comparable to the last bit, also where it is no number."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value


def _raised(faults, number, node):
    try:
        for step in range(STEPS):
            ill.apply_step(faults, number, node, step)
    except (RuntimeError, OSError, MemoryError) as error:
        return type(error).__name__, str(error)
    return None


def outcome(faults, number: int, node: str, seed: int = 7) -> dict:
    """Everything that a client, its update, its journey and its server come to in a round."""
    x, y = ill.apply_data(faults, number, node, *data(), CLASSES, seed)
    order = ill.apply_order(faults, number, node, torch.arange(12).view(STEPS, 4), len(y), seed)
    found = {"x": x, "y": y, "order": order, "local": ill.apply_local(faults, number, node, Local(iterations=STEPS))}
    state = LAYOUT.flat(model())
    ill.apply_state(faults, number, node, LAYOUT.views(state), seed)
    spoil = ill.gradient_fault(faults, number, node, seed)
    gradients = torch.full((STEPS, LAYOUT.weights), GRADIENT)
    for step in range(STEPS if spoil else 0):
        spoil(LAYOUT.views(gradients[step]), step)
    found |= {"state": state, "gradients": gradients, "raised": _raised(faults, number, node)}
    past = Past()
    sent = updates(past)
    for update in sent:
        ill.apply_update(faults, number, update, past, seed)
    if ill.any_collusion(faults, number):
        ill.apply_collusion(faults, number, sent, past, seed)
    mine = next(update for update in sent if update.node == node)
    found |= {"sent": mine.state, "samples": mine.samples, "start": mine.start}
    journey = Journey(node, began=5.0, download=1.0, compute=2.0, upload=3.0)
    found["journey"] = ill.apply_journey(faults, number, journey, seed)
    after = ill.apply_server(faults, number, past.models[-2], past.models[-1], LAYOUT.weights)
    found |= {"server": after, "silenced": ill.telemetry_is_lost(faults, number, node)}
    initial = LAYOUT.flat(model())
    ill.apply_initial(faults, LAYOUT.views(initial), seed)
    found |= {"initial": initial, "experiment": ill.apply_experiment(Settings(tuple(faults)))}
    found["experiment"] = (found["experiment"].local, found["experiment"].partition)
    return found


def changed(ill_one: dict, healthy: dict) -> set[str]:
    """At which places the two differ."""
    return {name for name in healthy if bits(ill_one[name]) != bits(healthy[name])}
