# SPDX-License-Identifier: Apache-2.0
"""Federations of the lab that are slow on purpose: which part of a round, and how much of it, is known before.

Links, devices and the server are made from the seconds that each part shall take, so that the planted one has its share
of the round: a mild one a little less than half, a strong one nearly all. Chance is on: no two clients are equal, and
no two rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedvitals import lab
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.datasets import load

CLIENTS, ROUNDS = 20, 5
STEPS, BATCH = 8, 16
STRENGTHS = (0.45, 0.6, 0.75, 0.85, 0.95)  # the planted part's share of a round
SECONDS = 10.0  # of everything that is not planted
UNEVEN = 1.15  # times as long the slowest of usual clients takes, by chance
LATENCY = 0.02  # seconds, one way
JITTER = SPREAD = 0.1
SLOW = "c3"  # the straggler
# What everything else takes, as shares of the rest of the round: none of them may pass for a bottleneck.
USUAL = {"download": 0.18, "data": 0.16, "compute": 0.2, "upload": 0.2, "aggregate": 0.13, "evaluate": 0.13}
MEMORY = 2**34


@dataclass(frozen=True, slots=True)
class Plant:
    """A federation, and what has to be said of it."""

    name: str  # of the kind: «upload-bound», «straggler by compute», ...
    strength: float
    experiment: lab.Experiment = field(repr=False)
    kind: str  # of verdict.KINDS
    bound_by: str | None = None  # what makes the straggler slow
    stragglers: tuple[str, ...] = ()
    tried: str | None = None  # the remedy that is run: the one that gains the most unless told


PARTS = {  # kind → the part that is planted, and the verdict that is right
    "compute-bound": ("compute", "compute"),
    "upload-bound": ("upload", "upload"),
    "download-bound": ("download", "download"),
    "aggregation-bound": ("aggregate", "aggregation"),
    "data-loading-bound": ("data", "data loading"),
    "server-bound": ("evaluate", "server"),
}
STRAGGLERS = {"straggler by compute": "compute", "straggler by upload": "upload"}
KINDS = (*PARTS, *STRAGGLERS)


def plants(strengths: tuple[float, ...] = STRENGTHS) -> list[Plant]:
    """Every kind at every strength."""
    return [planted(kind, strength, seed) for kind in KINDS for seed, strength in enumerate(strengths)]


def planted(kind: str, strength: float, seed: int = 0) -> Plant:
    """A federation of this kind; `strength`: the share of a round that would be saved if what is planted took no time.

    The seed draws clients, chances and data.
    """
    extra = SECONDS * strength / (1 - strength)
    if kind in STRAGGLERS:
        part, extra = STRAGGLERS[kind], UNEVEN * extra
        seconds = {name: SECONDS * share for name, share in USUAL.items()}
        experiment = federation(seconds, seed=seed, slow={part: seconds[part] + extra})
        return Plant(kind, strength, experiment, "straggler", part, (SLOW,))
    part, verdict = PARTS[kind]
    rest = sum(share for name, share in USUAL.items() if name != part)
    seconds = {name: SECONDS * share / rest for name, share in USUAL.items()} | {part: extra}
    return Plant(kind, strength, federation(seconds, seed=seed), verdict)


def latent() -> list[Plant]:
    """Small messages on links with latency, which no compression shortens: 4g, 3g, and an own link between the two.

    The gain of the smallest is a few per cent of a round, as small as what chance makes in five of them.
    """
    found = []
    between = lab.Link(4e6, 4e6, latency_seconds=0.12)
    cases = (("4g", 16), ("4g", 64), ("4g", 256), ("4g", 1024), ("3g", 32), ("between", 256))
    for seed, (link, hidden) in enumerate(cases):
        network = lab.Network(links=link, devices="laptop", profiles={"between": between}, jitter=JITTER, spread=SPREAD)
        experiment = lab.Experiment(
            name="latent",
            dataset="digits",
            model=lab.mlp(hidden=[hidden]),
            clients=CLIENTS,
            rounds=ROUNDS,
            local=lab.Local(iterations=STEPS, batch=BATCH, optimizer=lab.adam(learning_rate=3e-3)),
            network=network,
            seed=seed,
        )
        found.append(Plant(f"latency of {link}, {hidden} hidden", 0.0, experiment, "upload", tried="compress"))
    return found


def controls() -> list[Plant]:
    """Federations in which nothing stands out: the parts about equal, clients more or less alike."""
    found = []
    for seed, (jitter, spread) in enumerate(((0.0, 0.0), (0.1, 0.1), (0.2, 0.1), (0.1, 0.25), (0.3, 0.2))):
        seconds = {name: SECONDS * share for name, share in USUAL.items()}
        experiment = federation(seconds, seed=seed, jitter=jitter, spread=spread)
        found.append(Plant("balanced", 0.0, experiment, "nothing"))
    return found


def federation(
    seconds: Mapping[str, float],
    *,
    seed: int = 0,
    slow: Mapping[str, float] | None = None,
    jitter: float = JITTER,
    spread: float = SPREAD,
) -> lab.Experiment:
    """Digits, learnt by clients and a server to whom each part takes so many seconds; `slow`: other ones of one client.

    Testing takes the server as much longer than averaging as there are samples to test.
    """
    size, flops, forward = _sizes()
    averaging = 2 * CLIENTS * size
    tested = max(1, round(seconds["evaluate"] / seconds["aggregate"] * averaging / forward))
    own = {**seconds, **(slow or {})}
    profiles: dict[str, lab.Link | lab.Device] = {
        "link": _link(seconds, size),
        "device": _device(seconds, flops),
        "slow link": _link(own, size),
        "slow device": _device(own, flops),
        "hub": lab.Device(averaging / seconds["aggregate"], MEMORY),
    }
    network = lab.Network(
        links="link",
        devices="device",
        server="hub",
        profiles=profiles,
        overrides={SLOW: ("slow link", "slow device")} if slow else {},
        jitter=jitter,
        spread=spread,
    )
    return lab.Experiment(
        name="planted",
        dataset=_digits(tested),
        model=_MODEL,
        clients=CLIENTS,
        rounds=ROUNDS,
        local=lab.Local(iterations=STEPS, batch=BATCH, optimizer=lab.adam(learning_rate=3e-3)),
        network=network,
        seed=seed,
    )


_MODEL = lab.mlp(hidden=[32])


def _link(seconds: Mapping[str, float], size: int) -> lab.Link:
    down, up = (8 * 4 * size / max(seconds[way] - LATENCY, 1e-3) for way in ("download", "upload"))
    return lab.Link(down, up, latency_seconds=LATENCY)


def _device(seconds: Mapping[str, float], flops: int) -> lab.Device:
    samples = STEPS * BATCH
    return lab.Device(samples * flops / seconds["compute"], MEMORY, samples_per_second=samples / seconds["data"])


@functools.cache
def _sizes() -> tuple[int, int, int]:
    """Values of the model, and operations of one sample: forward and backward, and forward alone."""
    site = lab.Site.of(lab.Experiment(dataset="digits", model=_MODEL))
    return site.layout.size, site.flops, site.forward_flops


@functools.cache
def _digits(tested: int) -> Arrays:
    """The usual ones; so many of the test set, over and over if it has fewer."""
    whole = load(lab.Digits())
    places = [place % len(whole.test_y) for place in range(tested)]
    return Arrays(whole.x, whole.y, whole.test_x[places], whole.test_y[places], classes=10, name="digits")
