# SPDX-License-Identifier: Apache-2.0
"""Runs written down by hand, of which every second and byte is known: for tests of what is told of time and traffic."""

from dataclasses import dataclass, field

from fedvitals.records import Event, Layer, LayerTable, Metric, Run, Span, Transfer, Where
from fedvitals.store import open_store
from fedvitals.time_parts import edge_span

STARTED = 1.7e9
TABLE = LayerTable("parameter", (Layer("conv.weight", (10, 10), "float32"), Layer("head.weight", (300,), "float32")))
BYTES = 4 * 400  # of a model


@dataclass
class TimedRun:
    """One run's records: rounds one after the other, each as long as its slowest client and the server's own part."""

    run: Run
    records: list = field(default_factory=list)
    at: float = STARTED
    rounds: int = 0

    def round(self, clients, *, aggregate=0.5, clock="virtual", groups=None, accuracy=None, loss=None, sent=None):
        """`clients`: name → (download, compute, upload); None: it was asked and was not there."""
        number, groups = self.rounds, groups or {}
        self.rounds += 1
        virtual = {"clock": "virtual"} if clock == "virtual" else {}
        slowest = max((sum(parts) for parts in clients.values() if parts is not None), default=0.0)
        whole, trace, own = slowest + aggregate, "t" * 32, f"{self.run.id[-4:]}{number:012d}"
        parts = {"wait": slowest, "aggregate": aggregate}
        here = Where(self.run.id, number)
        self.add(Span(here, self.at, "round", whole, trace, own, None, virtual))
        told = {**virtual, "parts": parts}
        self.add(Span(Where(self.run.id, number, "server"), self.at, "server", whole, trace, f"s{own}", own, told))
        for group in sorted(set(groups.values())):
            spot = Where(self.run.id, number, group)
            self.add(Span(spot, self.at, "edge", whole, trace, edge_span(own, group), own, virtual))
        for node, way in clients.items():
            spot = Where(self.run.id, number, node, group=groups.get(node))
            parent = edge_span(own, groups[node]) if node in groups else own
            self.client(spot, way, whole, {**virtual}, (trace, f"{node}{own}", parent), (sent or {}).get(node, BYTES))
        name = "time.round_virtual" if virtual else "time.round"
        self.add(Metric(here, self.at, name, whole))
        if virtual:
            self.add(Metric(here, self.at, "time.round", 0.25))
        for metric, value in (("accuracy", accuracy), ("loss", loss)):
            if value is not None:
                self.add(Metric(here, self.at, metric, value))
        self.at += whole
        return number

    def client(self, spot, way, whole, attributes, ids, size):
        trace, own, parent = ids
        if way is None:
            self.add(
                Span(spot, self.at, "journey", whole, trace, own, parent, {**attributes, "parts": {"away": whole}})
            )
            self.add(Event(spot, self.at, "warning", "client.dropped_out", f"{spot.node} is not there."))
            return
        download, compute, upload = way
        parts = {"download": download, "compute": compute, "upload": upload, "wait": whole - sum(way)}
        self.add(Span(spot, self.at, "journey", whole, trace, own, parent, {**attributes, "parts": parts}))
        for name, value in (("steps", 10.0), ("update.norm", 1.0)):
            self.add(Metric(spot, self.at, name, value))
        peer = spot.group or "server"
        self.add(Transfer(spot, self.at, peer, spot.node, BYTES, BYTES, download, "model"))
        self.add(Transfer(spot, self.at, spot.node, peer, size, BYTES, upload, "update"))

    def add(self, record):
        object.__setattr__(record, "source", "hand")
        object.__setattr__(record, "sequence", len(self.records))
        self.records.append(record)


def begin(identity="r1", name="invented", *, seed=0, config=None, topology="centralized", started=STARTED):
    run = Run(identity, name, "lab", topology, config or {}, seed, started, started + 100, {"torch": "2.13"}, (TABLE,))
    told = TimedRun(run, at=started)
    told.add(run)
    return told


def stored(path, *runs):
    """The store that holds them."""
    store = open_store(path)
    for one in runs:
        store.write(one.records)
    store.close()
    return path
