# SPDX-License-Identifier: Apache-2.0
"""A large synthetic run: plausible records at any size, to test the store and the dashboard.

For each client-round ten vital signs, two Spans with parts and two transfers; for each round what a monitor records of
the whole, with layer statistics of five families; every tenth round the clients' own layer statistics and sketches (at
1,000 clients × 50 layers, all rounds would be 1.8 GB). One client is faulty from the middle on, one is slow, one sends
NaN at times, some drop out; the findings of a detector on them are included.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedvitals.measurements import stamped
from fedvitals.protocols import Sink
from fedvitals.records import (
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Record,
    Run,
    Sketch,
    Span,
    Suspect,
    Transfer,
    Where,
)
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT, Array, empty_sums
from fedvitals.time_parts import CLIENT, JOURNEY, ROUND, SERVER

STARTED = 1.75e9
MODEL_BYTES = 4_000_000
DIGITS = 32  # of a sketch


@dataclass(frozen=True)
class Synthetic:
    """Its size and state; `share` of the clients take part in a round."""

    clients: int = 1000
    rounds: int = 500
    layers: int = 50
    share: float = 1.0
    every: int = 10  # rounds between two with the clients' own layers
    seed: int = 7
    run: str = "synthetic"

    @cached_property
    def names(self) -> list[str]:
        return [f"c{i}" for i in range(self.clients)]

    @cached_property
    def tables(self) -> tuple[LayerTable, LayerTable]:
        """Return the tables of parameters and of modules."""
        parameters = tuple(Layer(f"block{i}.conv.weight", (64, 64), "float32") for i in range(self.layers))
        modules = tuple(Layer(f"block{i}.relu", (64,), "float32") for i in range(self.layers))
        return LayerTable("parameter", parameters), LayerTable("module", modules)

    @cached_property
    def character(self) -> dict[str, Array]:
        """Return the constant properties of each client."""
        rng = np.random.default_rng(self.seed)
        return {
            "hardness": rng.normal(0, 0.08, self.clients),
            "speed": rng.lognormal(0, 0.35, self.clients),
            "link": rng.lognormal(0, 0.5, self.clients),
            "samples": rng.integers(80, 1200, self.clients).astype(float),
            "kind": rng.integers(0, 3, self.clients).astype(float),
        }

    @property
    def ill_since(self) -> int:
        return self.rounds // 2

    def as_run(self, finished: float | None = None) -> Run:
        config = {
            "rounds": self.rounds,
            "dataset": "none: invented by fedvitals_studies.bench.synthetic",
            "fedvitals": {"probes": "standard", "detectors": 34, "cure": {"all": "suggest"}, "privacy": 3},
        }  # fmt: skip
        return Run(self.run, "synthetic", "torch", None, config, self.seed, STARTED, finished, {}, self.tables)


def write_run(sink: Sink, size: Synthetic, rounds: int | None = None) -> None:
    """Write the whole run, round by round; without an end if only some rounds are requested."""
    sink.write([stamped(size.as_run(), "run", 0)])
    for number in range(size.rounds if rounds is None else rounds):
        sink.write(records_of_round(size, number))
    if rounds is None:
        sink.write([stamped(size.as_run(STARTED + 12.0 * size.rounds), "run", 1)])


def records_of_round(size: Synthetic, number: int) -> list[Record]:
    """Return everything about one round; always the same."""
    rng = np.random.default_rng((size.seed, number))
    told = _Round(size, number, rng)
    found = [*told.metrics(), *told.whole(), *told.spans(), *told.layers(), *told.events(), *told.findings()]
    first = number * 100 * size.clients
    return [stamped(record, "synthetic", first + i) for i, record in enumerate(found)]


def _sums(scale: Array, rng: np.random.Generator, zeros: float = 0.02) -> Array:
    """Return nine sums of 4096 normal numbers of these scales, for each entry and layer."""
    count = 4096
    rows = empty_sums(*scale.shape)
    rows[..., 0], rows[..., 6] = count, np.round(zeros * count)
    rows[..., 1] = rng.normal(size=scale.shape) * scale * math.sqrt(count)
    rows[..., 2] = count * scale**2
    rows[..., 3] = 0.7979 * count * scale
    rows[..., 4], rows[..., 5] = -3.5 * scale, 3.5 * scale
    return rows


_GRID = np.linspace(-80.0, 80.0, 3201)
_BELOW = np.array([math.erf(2.0**x / math.sqrt(2)) for x in np.minimum(_GRID, 20)])


def _histogram(scale: Array) -> Array:
    """Return counts by sign and binary exponent of 4096 normal numbers of these scales."""
    edges = np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + EXPONENTS + 1) - np.log2(scale)[..., None]
    below = np.interp(edges, _GRID, _BELOW)
    half = np.round(2048 * np.diff(below, axis=-1))
    return np.concatenate([half, half], axis=-1)


class _Round:
    def __init__(self, size: Synthetic, number: int, rng: np.random.Generator) -> None:
        self.size, self.number, self._rng = size, number, rng
        self.at = STARTED + 12.0 * number
        self.ill = number >= size.ill_since
        self.there = np.sort(rng.permutation(size.clients)[: max(1, round(size.share * size.clients))])
        away = rng.random(len(self.there)) < 0.002
        self.away = [size.names[i] for i in self.there[away]]
        self.there = self.there[~away]
        self.progress = math.exp(-3.0 * number / size.rounds)
        own = {name: values[self.there] for name, values in size.character.items()}
        self.download = 0.4 * own["link"] * rng.lognormal(0, 0.1, len(self.there))
        self.compute = 4.0 * own["speed"] * rng.lognormal(0, 0.05, len(self.there))
        self.compute[self.there == 13 % size.clients] *= 3  # the slow client
        self.upload = 1.5 * self.download
        self.total = self.download + self.compute + self.upload
        self.seconds = float(self.total.max()) + 0.5

    def _where(self, node: str | None = None) -> Where:
        return Where(self.size.run, self.number, node)

    def _values(self) -> dict[str, Array]:
        """Return the clients' vital signs."""
        rng, count, own = self._rng, len(self.there), {k: v[self.there] for k, v in self.size.character.items()}
        loss = 0.25 + 2.0 * self.progress + own["hardness"] + rng.normal(0, 0.03, count)
        norm = (0.4 + 1.2 * self.progress) * rng.lognormal(0, 0.12, count)
        cosine = np.clip(0.75 - 0.3 * (1 - self.progress) + rng.normal(0, 0.04, count), -1, 1)
        gradient = (0.1 + self.progress) * rng.lognormal(0, 0.15, count)
        ill = (self.there == 7 % self.size.clients) & self.ill
        loss[ill] += 1.1
        norm[ill] *= 2.6
        cosine[ill] -= 0.6
        strange = (self.there == 42 % self.size.clients) & (self.number % 97 == 41)
        gradient[strange] = np.nan
        return {
            "loss": loss,
            "update.norm": norm,
            "update.cosine_mean": cosine,
            "gradient.norm": gradient,
            "weight.drift": norm * 1.1,
            "time.client": self.compute,
            "steps": np.ceil(own["samples"] / 16),
            "samples": own["samples"],
            "traffic.sent": np.full(count, MODEL_BYTES / 4),
            "traffic.received": np.full(count, float(MODEL_BYTES)),
        }

    def metrics(self) -> Iterator[Record]:
        at = (self.at + self.download + self.compute).tolist()
        places = [self._where(self.size.names[i]) for i in self.there]
        for name, values in self._values().items():
            for where, when, value in zip(places, at, values.tolist(), strict=True):
                yield Metric(where, when, name, value)

    def whole(self) -> Iterator[Record]:
        """Yield what is recorded of the whole round, when it is closed."""
        rng, end, where = self._rng, self.at + self.seconds, self._where()
        gsc = 1.5 + 2.0 * (1 - self.progress) + float(rng.normal(0, 0.02))
        bound = {"download": 0.1, "data_loading": 0.02, "compute": 0.6, "upload": 0.15, "server": 0.03,
                 "aggregation": 0.02, "straggler": 0.08}  # fmt: skip
        values = {
            "accuracy": 0.95 - 0.8 * self.progress + float(rng.normal(0, 0.004)) - 0.03 * self.ill,
            "loss": 0.2 + 2.0 * self.progress + float(rng.normal(0, 0.01)) + 0.05 * self.ill,
            "clients": float(len(self.there)),
            "clients.failed": float(len(self.away)),
            "scale.gsc": gsc,
            "memory.peak": 3e9,
            "memory.resident": 2.5e9 + 1e6 * self.number,
            **{f"bottleneck.{name}": share for name, share in bound.items()},
            "monitor.lost": 0.0,
            "monitor.cost": 0.02 * self.seconds,
            "time.aggregate": 0.3,
            "time.evaluate": 0.2,
            "time.round": self.seconds,
        }
        for name, value in values.items():
            yield Metric(where, end, name, value)
        for name, size in (("traffic.sent", 1.0), ("traffic.received", 0.25)):
            yield Metric(self._where("server"), end, name, size * MODEL_BYTES * len(self.there))

    def _id(self, *what: object) -> str:
        return hashlib.blake2b(repr((self.size.run, self.number, *what)).encode(), digest_size=8).hexdigest()

    def spans(self) -> Iterator[Record]:
        trace, whole = self._id("trace") * 2, self._id("round")
        wait = self.seconds - 0.5
        slowest = self.size.names[int(self.there[int(self.total.argmax())])]
        server = {"wait": wait, "aggregate": 0.3, "evaluate": 0.2}
        yield Span(self._where(), self.at, ROUND, self.seconds, trace, whole)
        told: dict[str, Any] = {"parts": server, "waited_for": slowest}
        yield Span(self._where("server"), self.at, SERVER, self.seconds, trace, self._id("server"), whole, told)
        times = np.stack([self.download, self.compute, self.upload, wait - self.total], axis=1).tolist()
        for i, (download, compute, upload, rest) in zip(self.there.tolist(), times, strict=True):
            node, way = self.size.names[i], self._id("way", i)
            where, began = self._where(node), self.at + download
            parts = {"download": download, "compute": compute, "upload": upload, "wait": rest}
            told = {"parts": parts} if node == slowest else {"parts": parts, "waited_for": slowest}
            yield Span(where, self.at, JOURNEY, wait, trace, way, whole, told)
            own = {"data": 0.1 * compute, "forward": 0.3 * compute, "backward": 0.5 * compute,
                   "optimizer": 0.05 * compute, "measure": 0.02 * compute}  # fmt: skip
            told = {"failed": False, "parts": own, "folded": True, "samples": 400, "batch": 16}
            yield Span(where, began, CLIENT, compute, trace, self._id("client", i), way, told)
            yield Transfer(where, began, "server", node, MODEL_BYTES, MODEL_BYTES, download, "model")
            yield Transfer(
                where, began + compute + upload, node, "server", MODEL_BYTES // 4, MODEL_BYTES, upload, "update"
            )

    def layers(self) -> Iterator[Record]:
        rng, (parameters, modules) = self._rng, self.size.tables
        depth = np.arange(self.size.layers)
        flow = (0.02 + 0.1 * self.progress) * np.exp(-0.04 * (self.size.layers - 1 - depth))
        flow = flow * rng.lognormal(0, 0.05, self.size.layers)
        end = self.at + self.seconds
        health = np.zeros((self.size.layers, 4))
        health[:, 0], health[:, 3] = 64, 60
        health[:, 1] = np.round(64 * np.minimum(0.9, 0.002 * depth + 0.2 * (depth == 30) * (1 - self.progress)))
        tables = {"activation.health": modules}
        matrices = {
            "gradient": _sums(flow, rng),
            "gradient.histogram": _histogram(flow),
            "update": _sums(0.1 * flow, rng),
            "weight": _sums(np.asarray(0.05 + 0.001 * depth, float), rng),
            "activation.health": health,
        }
        for family, matrix in matrices.items():
            yield LayerStats(self._where(), end, family, matrix, tables.get(family, parameters).digest)
        if self.number % self.size.every == 0:
            yield from self._own_layers(flow, parameters.digest)

    def _own_layers(self, flow: Array, digest: str) -> Iterator[Record]:
        rng, end = self._rng, self.at + self.seconds
        scale = flow * rng.lognormal(0, 0.1, (len(self.there), 1))
        scale[self.there == 7 % self.size.clients] *= 2.6 if self.ill else 1.0
        groups = np.random.default_rng(self.size.seed).normal(size=(3, DIGITS))
        sketches = groups[self.size.character["kind"][self.there].astype(int)] + rng.normal(
            0, 0.5, (len(scale), DIGITS)
        )
        sketches[self.there == 7 % self.size.clients] *= -1.0 if self.ill else 1.0
        families = {"gradient": _sums(scale, rng), "update": _sums(0.1 * scale, rng)}
        for row, i in enumerate(self.there.tolist()):
            where = self._where(self.size.names[i])
            for family, matrices in families.items():
                yield LayerStats(where, end, family, matrices[row], digest)
            yield Sketch(where, end, tuple(sketches[row].tolist()), self._id("sketch", i))

    def events(self) -> Iterator[Record]:
        for node in self.away:
            yield Event(
                self._where(node), self.at, "warning", "client.dropped_out", f"{node} was asked and is not there."
            )
        if self.number == 0:
            for i in self.there.tolist():
                counts = {str(label): 10 + (7 * i + 3 * label) % 40 for label in range(10)}
                text = ", ".join(f"{label}: {count}" for label, count in counts.items())
                node = self.size.names[i]
                yield Event(self._where(node), self.at, "info", "labels", text, {"histogram": counts})

    def findings(self) -> Iterator[Record]:
        end, since, names = self.at + self.seconds, self.size.ill_since, self.size.names
        if self.number >= since + 2:
            node = names[7 % self.size.clients]
            numbers = [_number("loss", 1.6, 0.5, 8.1), _number("update.cosine_mean", -0.1, 0.5, -7.4)]
            yield Finding(
                self._where(node), end, "LABEL_NOISE", "critical", 0.96,
                f"{node} is unlike its peers since round {since}: most likely random wrong labels.",
                {"since": since, "numbers": numbers}, (Suspect(node, 0.96, "its loss and its direction"),),
            )  # fmt: skip
        if self.number >= 5 and self.number % 5 == 0:
            node = names[13 % self.size.clients]
            numbers = [_number("time.client", 12.0, 4.0, 6.0)]
            text = f"{node} takes 3.0 times as long as its peers for the same work."
            yield Finding(self._where(node), end, "STRAGGLER", "warning", 0.9, text, {"since": 0, "numbers": numbers})
        if self.number % 97 == 41:
            node = names[42 % self.size.clients]
            text = f"{node} sends gradients that are no numbers."
            numbers = [_number("gradient.norm", math.nan, 0.5, math.inf)]
            yield Finding(self._where(node), end, "NAN_GRADIENT", "critical", 1.0, text,
                          {"since": self.number, "numbers": numbers})  # fmt: skip
        if self.number == (3 * self.size.rounds) // 4:
            text = "Accuracy has not risen for 20 rounds."
            yield Finding(
                self._where(), end, "PLATEAU", "note", 0.6, text, {"since": max(0, self.number - 20), "numbers": []}
            )


def _number(name: str, value: float, usual: float, score: float) -> dict[str, Any]:
    return {"name": name, "value": value, "usual": usual, "score": score, "of": "peers"}
