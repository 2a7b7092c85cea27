# SPDX-License-Identifier: Apache-2.0
"""A small federation of which one client lies in its telemetry: the server knows who sends, and holds the updates."""

import math
import time
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

import fedvitals as fv
from fedvitals.measurements import stamped
from fedvitals.records import Finding, Layer, LayerStats, LayerTable, Metric, Run, Span, Where
from fedvitals.stats import COUNT, MAX, MIN, NANS, SUM_MAGNITUDES, SUM_SQUARES, empty_sums
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from fedvitals.transport.wire.payload import encode

LIAR, HONEST = "liar", ("ann", "bob", "cid", "dan", "eve")
THERE = "their-run"  # what the clients call the run
ROUNDS = 5
HERE = Where(THERE, None, LIAR)
SPAN = {"trace": "0" * 32, "id": "0" * 16}
ONE_LAYER = LayerTable("parameter", (Layer("0.weight", (8, 8), "float32"),))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


OF_MODEL = LayerTable("parameter", tuple(Layer(n, tuple(p.shape), "float32") for n, p in model().named_parameters()))


def update_statistics(table=ONE_LAYER, *, nans=0.0, where=HERE, at=None, family="update"):
    """Sums of an update that is small and healthy, unless it is said to have NaNs."""
    rows = empty_sums(len(table.layers))
    rows[:, COUNT] = [math.prod(layer.shape) for layer in table.layers]
    rows[:, NANS], rows[:, SUM_SQUARES], rows[:, SUM_MAGNITUDES] = nans, 0.01, 0.3
    rows[:, MIN], rows[:, MAX] = -0.1, 0.1
    return LayerStats(where, time.time() if at is None else at, family, rows, table.digest)


def tables(*brought):
    return Run(THERE, "theirs", tables=brought)


def measured(node, number):
    """What an honest client tells of a round."""
    where, now = Where(THERE, None, node), time.time()
    numbers = {"gradient.norm": 1.0, "steps": 10.0, "loss": 1 / (1 + number) + 0.001 * len(node), "weight.norm": 2.0}
    metrics = [Metric(where, now, name, value) for name, value in numbers.items()]
    return [*metrics, Span(where, now, "client", 0.001, **SPAN, attributes={"failed": False})]


def payload(records, source):
    return encode([stamped(replace(record), source, i) for i, record in enumerate(records)])


class Federation:
    """Rounds of a server that holds the updates; `lies(number)` gives what the liar adds to its telemetry."""

    def __init__(self, monitor, sink, lies, *, ill=(), brings=None):
        self.monitor, self.sink, self.lies, self.ill = monitor, sink, lies, ill
        self.brings = brings or (lambda _: [])  # what honest clients add
        self.model = model()
        self.stream = torch.Generator().manual_seed(0)

    def update_of(self, node, number):
        drawn = [torch.randn(p.shape, generator=self.stream) * 0.01 + 0.01 for p in self.model.parameters()]
        return [torch.full_like(values, math.nan) for values in drawn] if node in self.ill and number > 1 else drawn

    def round(self, number, *, first=False):
        self.monitor.host.round_begin(number, self.model)
        for node in (LIAR, *HONEST) if first else (*HONEST, LIAR):
            sent = time.time()
            self.monitor.exchange(node, sent, sent, sent, sent + 0.01)
            added = self.lies(number) if node == LIAR else self.brings(node)
            own = [*measured(node, number), *added]
            self.monitor.host.absorb(payload(own, f"{node}-{number}"), Sender(node, THERE))
            self.monitor.updates(number, {node: self.update_of(node, number)})
        self.monitor.host.round_end(number, self.model, {"loss": 1 / (1 + number), "accuracy": 1 - 1 / (2 + number)})

    def check_others(self, rounds=ROUNDS):
        """All rounds are complete, and so are the honest clients' numbers; none of these is refused or accused."""
        sink = self.sink
        assert [m.where.round for m in sink.metrics("time.round")] == [*range(rounds)]
        for node in HONEST:
            for name in ("loss", "gradient.norm", "update.norm", "update.cosine_mean"):
                healthy = [n for n in range(rounds) if not (node in self.ill and n > 1 and "cosine" in name)]
                assert [m.where.round for m in sink.metrics(name, node=node)] == healthy, (node, name)
            assert len(sink.of(LayerStats, "update", node=node)) == rounds
            assert not sink.events("telemetry.refused", node=node)
        accused = {f.where.node for f in sink.of(Finding)} | {s.node for f in sink.of(Finding) for s in f.suspects}
        assert accused <= {None, LIAR, *self.ill}, [f.message for f in sink.of(Finding)]
        assert {r.where.group for r in sink.records if not isinstance(r, Run)} == {None}

    def refusals(self):
        return [(event.where.node, event.where.round) for event in self.sink.events("telemetry.refused")]

    def nan_updates(self):
        """The clients and rounds that a NAN_UPDATE names."""
        return sorted((f.where.node, f.where.round) for f in self.sink.of(Finding, "NAN_UPDATE"))


@contextmanager
def federation(lies, *, ill=(), brings=None, store=None, **settings):
    sink = MemorySink()
    with fv.Monitor(store, sinks=[sink], machine=False, **settings) as monitor:
        monitor.host.describe("flower", {})
        yield Federation(monitor, sink, lies, ill=ill, brings=brings)


def run(lies, *, first=False, rounds=ROUNDS, **settings):
    with federation(lies, **settings) as found:
        for number in range(rounds):
            found.round(number, first=first)
    found.check_others(rounds)
    assert not found.sink.events("monitor.error")
    return found
