# SPDX-License-Identifier: Apache-2.0
"""Every part of the lab once, in an experiment small enough to be run on any device in a moment."""

from __future__ import annotations

import torch

from fedvitals import lab
from fedvitals.lab.compression import COMPRESSIONS
from fedvitals.lab.description import kind_of
from fedvitals.lab.experiment import AGGREGATORS
from fedvitals.lab.faults import language
from fedvitals.lab.faults.fault import RunFault
from fedvitals.lab.faults.table import FAULTS
from fedvitals.protocols import NullObserver
from fedvitals.records import Action, Where

CLIENTS = 8
LOCAL = lab.Local(iterations=3, batch=4)
PHONES = lab.Network(links="4g", devices={"phone": 0.5, "laptop": 0.5}, spread=0.5, jitter=0.3)
NEEDS = {"krum": {"faulty": 1}, "multi_krum": {"faulty": 1}, "memory_hog": {"megabytes": 1}}
NEEDS |= {"optimal_little_is_enough": {"evaluations": 2}, "optimal_inner_product": {"evaluations": 2}}
MANY = {"little_is_enough", "inner_product", "group_left_behind", "distributed_backdoor", "sybils"}


def images() -> lab.Arrays:
    """Two kinds of 8 × 8 pixels that differ in their upper half."""
    stream = torch.Generator().manual_seed(5)
    y = torch.arange(200) % 2
    x = torch.randn(200, 1, 8, 8, generator=stream)
    x[:, :, :4] += (2.0 * y - 1)[:, None, None, None]
    return lab.Arrays(x, y)


def fault(kind: type, **more):
    name = kind_of(kind.__name__)
    whole = issubclass(kind, RunFault) or kind.strikes == "server"
    nodes = {} if whole else {"nodes": ["c1", "c2", "c5"] if name in MANY else ["c1"]}
    return kind(**nodes, **NEEDS.get(name, {}), **more)


def _named(kinds, field, skipped=()):
    names = {kind_of(kind.__name__): kind for kind in kinds}
    return {
        f"{field} {name}": {field: kind(**NEEDS.get(name, {}))} for name, kind in names.items() if name not in skipped
    }


TOPOLOGIES = {
    "centralized": {},
    "hierarchical": {"topology": lab.Hierarchical(edges=2)},
    "hierarchical, uneven": {"topology": lab.Hierarchical(edges=3), "partition": lab.QuantitySkew(sigma=0.7)},
    "rings": {"topology": lab.Rings(3)},
    "clustered": {"topology": lab.Clustered(threshold=0.4, smallest=2, every=1), "rounds": 3},
    "one cluster": {"topology": lab.Clustered(threshold=100.0, smallest=3, every=1), "rounds": 3},
    "asynchronous": {"topology": lab.Asynchronous(buffer=3, concurrency=6), "network": PHONES, "rounds": 3},
}
TRAININGS = {
    "adam": {"local": lab.Local(iterations=3, batch=4, optimizer=lab.adam(learning_rate=1e-3))},
    "momentum": {"local": lab.Local(iterations=3, batch=4, optimizer=lab.sgd(0.05, 0.9))},
    "proximal, clipped": {"local": lab.Local(iterations=3, batch=4, proximal=0.5, clip=lab.Clip(0.2, "whole"))},
    "clipped by tensor": {"local": lab.Local(iterations=3, batch=4, clip=lab.Clip(0.1))},
    "epochs": {"local": lab.Local(epochs=1, batch=4), "partition": lab.QuantitySkew(sigma=0.7)},
    "weight decay": {"local": lab.Local(iterations=3, batch=4, optimizer=lab.sgd(0.05, 0.9, weight_decay=0.1))},
    "adam, weight decay": {"local": lab.Local(iterations=3, batch=4, optimizer=lab.adam(weight_decay=0.1))},
    "plain_sgd, accumulated": {
        "local": lab.Local(iterations=3, batch=2, accumulate=3, optimizer=lab.plain_sgd(), schedule=lab.steps(1))
    },
    "feddyn, momentum, clipped": {
        "aggregator": lab.feddyn(alpha=0.5),
        "local": lab.Local(epochs=1, batch=4, optimizer=lab.sgd(0.05, 0.9), clip=lab.Clip(0.2)),
        "partition": lab.QuantitySkew(sigma=0.7),
        "rounds": 3,
    },
    "scaffold, half of the clients": {"aggregator": "scaffold", "participation": 0.5, "rounds": 4},
    "half of the clients": {"participation": 0.5},
    "drop-out": {"network": lab.Network(links="4g", devices="phone", availability=0.6, spread=1.0, over_selection=1.3)},
    "images": {"dataset": images(), "model": lab.CNN(channels=(4, 6))},
    "images, edges": {"dataset": images(), "model": lab.CNN(channels=(4, 6)), "topology": lab.Hierarchical(edges=2)},
}
TEXT = {
    "dataset": lab.synthetic(targets="tokens", sequence=10, vocabulary=8, samples=200),
    "model": lab.gpt(width=8, heads=2, layers=1),
}
LORA = {"parameters": lab.Parameters(adapters=lab.lora(rank=4))}
ADAPTED = {
    "frozen": {"parameters": lab.Parameters(frozen=("dense1.*",))},
    "lora": LORA,
    "lora, ranks": {"parameters": lab.Parameters(adapters=lab.lora(rank=4, ranks={"c0": 2, "c3": 1}))},
    "lora, text": {**TEXT, **LORA},
    "lora, edges": {**LORA, "topology": lab.Hierarchical(edges=2)},
    "rank_partitioned": {
        "parameters": lab.Parameters(adapters=lab.lora(rank=4, ranks={"c0": 2}, aggregation="rank_partitioned"))
    },
    "bottleneck": {"parameters": lab.Parameters(adapters=lab.bottleneck(3))},
}
CHANGES = [lab.new_data(nodes=["c1", "c2"], since=1, alpha=0.2), lab.season(period=2, brightness=0.4, labels=0.9)]
POPULATIONS = {
    "permuted labels": {"partition": lab.PermutedLabels(groups=2)},
    "population": {
        "population": lab.Population(joins={"c3": 1}, leaves={"c4": 2}, changes=CHANGES),
        "local": lab.Local(epochs=1, batch=4),
        "rounds": 3,
    },
}
FAULTY = {
    f"fault {kind_of(kind.__name__)}": {"faults": [fault(kind)], "rounds": 3}
    for kind in FAULTS
    if kind_of(kind.__name__) != "broken_batch_norm"  # no model with a batch norm can be stacked
    and kind not in language.FAULTS
}
FAULTY |= {
    f"fault {kind_of(kind.__name__)}": {**TEXT, **LORA, "faults": [fault(kind)]}
    for kind in language.FAULTS
    if kind_of(kind.__name__) != "adapter_scale"  # nor one with an α/r for each client
}
FAULTY |= {
    "fault corrupted_message, silent": {"faults": [lab.corrupted_message(nodes=["c1"], silent=True, share=0.05)]},
    "fault duplicate, noisy": {"faults": [lab.duplicate(nodes=["c1"], noise=0.1)], "topology": lab.Hierarchical(2)},
    "fault backdoor, growing": {"faults": [lab.backdoor(nodes=["c1"], ramp=3), lab.scaling(nodes=["c2"], every=2)]},
    "fault gaussian, on top": {"faults": [lab.gaussian(nodes=["c1"], add=True)]},
    "fault not_finite, trimmed": {"faults": [lab.not_finite(nodes=["c1"])], "aggregator": lab.median()},
    "fault not_finite, krum": {"faults": [lab.not_finite(nodes=["c1"])], "aggregator": lab.krum(1)},
    "fault not_finite, clipped": {"faults": [lab.not_finite(nodes=["c1"])], "aggregator": lab.norm_clipping()},
    "fault not_finite, edges": {"faults": [lab.not_finite(nodes=["c1"])], "topology": lab.Hierarchical(edges=3)},
}
CASES: dict[str, dict] = {
    **TOPOLOGIES,
    **TRAININGS,
    **POPULATIONS,
    **ADAPTED,
    **_named(AGGREGATORS, "aggregator"),
    "aggregator norm_clipping, known": {"aggregator": lab.norm_clipping(norm=0.05)},
    **_named(COMPRESSIONS, "compression"),
    "error feedback": {"compression": lab.int8(error_feedback=True)},
    "client_dp": {"privacy": lab.client_dp(clip=0.1, noise=0.0)},  # no noise, no ε: the accountant is an extra
    "central_dp": {"privacy": lab.central_dp(clip=0.1, noise=0.0)},
    "secure aggregation": {"secure_aggregation": lab.SecureAggregation()},
    **FAULTY,
}


def experiment(name: str = "centralized", **changes) -> lab.Experiment:
    settings = {
        "dataset": lab.Synthetic(samples=240, features=6, classes=3),
        "model": lab.MLP(hidden=(8,)),
        "local": LOCAL,
        "clients": CLIENTS,
        "rounds": 2,
        "seed": 3,
    }
    return lab.Experiment(**{**settings, **CASES[name], **changes})


class Doctor(NullObserver):
    """Prescribes one of each correction, from round 1 on, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def event(self, level, name, message, *, node=None, data=None):
        self.told.append((name, message))

    def refused(self, action, why):
        self.told.append(("refused", f"{action.kind}: {why}"))

    def prescribed(self, number):
        keep = Action(Where("r", number), 0.0, "", "checkpoint", None, {"keep": list(range(-1, number))})
        return [keep, *(ORDERS if number else ())]


def _order(kind, target=None, **arguments):
    return Action(Where("r"), 0.0, "TEST", kind, target, {"id": kind, **arguments})


ORDERS = [
    _order("quarantine", "c2"),
    _order("reweight", "c3", factor=0.5),
    _order("clip_updates", norm=0.02),
    _order("clip_gradients", limit=0.5),
    _order("stop_client_at_nonfinite"),
    _order("client_rate", factor=0.5),
    _order("shorten_local_training", factor=0.7),
    _order("server_rate", factor=0.5),
    _order("robust_aggregator", rule="median"),
    _order("roll_back", restore=0),
]
