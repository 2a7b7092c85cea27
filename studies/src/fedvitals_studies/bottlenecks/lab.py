# SPDX-License-Identifier: Apache-2.0
"""Federations of the lab that are slow on purpose: which part of a round is slow, and by how much, is known beforehand.

Links, devices and the server are configured from the intended seconds of each part, so that the planted one has its
share of the round: a mild one a little less than half, a strong one nearly all. With randomness: no two clients are
equal, and no two rounds.
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
SECONDS = 10.0  # total of everything that is not planted
UNEVEN = 1.15  # times the usual duration that the slowest of usual clients takes, by chance
LATENCY = 0.02  # seconds, one way
JITTER = SPREAD = 0.1
SLOW = "c3"  # the straggler
# The other parts' shares of the rest of the round: none of them may look like a bottleneck.
USUAL = {"download": 0.18, "data": 0.16, "compute": 0.2, "upload": 0.2, "aggregate": 0.13, "evaluate": 0.13}
MEMORY = 2**34


@dataclass(frozen=True, slots=True)
class Plant:
    """A federation, and the correct verdict on it."""

    name: str  # of the bottleneck: «upload-bound», «straggler by compute», ...
    strength: float
    experiment: lab.Experiment = field(repr=False)
    kind: str  # of verdict.KINDS
    bound_by: str | None = None  # what makes the straggler slow
    stragglers: tuple[str, ...] = ()
    tried: str | None = None  # the remedy to run; by default the one with the largest gain


PARTS = {  # kind → the planted part, and the right verdict
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
    """Return every kind at every strength."""
    return [planted(kind, strength, seed) for kind in KINDS for seed, strength in enumerate(strengths)]


def planted(kind: str, strength: float, seed: int = 0) -> Plant:
    """Return a federation of this kind; `strength`: the share of a round saved if the planted part took no time.

    The seed determines clients, randomness and data.
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
    """Return cases with small messages on links with latency, which compression does not shorten: 4g, 3g, and one
    between.

    The smallest gain is a few per cent of a round, as small as the random variation over five of them.
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
    """Return federations in which nothing stands out: the parts about equal, clients more or less alike."""
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
    """Return digits, learnt by clients and a server whose parts take these seconds; `slow`: other ones for one client.

    The server's testing takes longer than averaging in proportion to the number of test samples.
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
    """Return the number of the model's values, and operations per sample: forward and backward, and forward alone."""
    site = lab.Site.of(lab.Experiment(dataset="digits", model=_MODEL))
    return site.layout.size, site.flops, site.forward_flops


@functools.cache
def _digits(tested: int) -> Arrays:
    """Return the usual digits, with `tested` test samples, repeated if there are fewer."""
    whole = load(lab.Digits())
    places = [place % len(whole.test_y) for place in range(tested)]
    return Arrays(whole.x, whole.y, whole.test_x[places], whole.test_y[places], classes=10, name="digits")
