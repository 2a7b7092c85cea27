# SPDX-License-Identifier: Apache-2.0
"""A federation small enough to be followed by hand, and an observer that writes down what it is told."""

from __future__ import annotations

from fedvitals import lab
from fedvitals.protocols import NullObserver

RATE, STEPS = 0.1, 4


def experiment(**changes):
    """Nine clients of different sizes, plain SGD, four steps: small enough to be followed by hand."""
    settings = {
        "dataset": lab.Synthetic(samples=450, features=6, classes=3),
        "partition": lab.QuantitySkew(sigma=0.5),
        "model": "mlp",
        "local": lab.Local(iterations=STEPS, batch=8, optimizer=lab.SGD(learning_rate=RATE)),
        "clients": 9,
        "rounds": 2,
        "seed": 3,
        **changes,
    }
    return lab.Experiment(**settings)


def run(e, observer=None, **more):
    return lab.run(e, observer, engine="sequential", **more).state


class Watcher(NullObserver):
    """Transfers and events as they were told, by round; spans with their parents' numbers."""

    def __init__(self):
        self.transfers, self.told, self.trained, self.spans, self.logged, self.hours = [], [], [], [], [], []

    def round_begin(self, *_, **__):
        self.transfers.append([])
        self.trained.append([])
        self.hours.append({})

    def expect(self, *nodes):
        self.trained[-1] += nodes

    def transfer(self, sender, receiver, bytes, raw_bytes=None, seconds=None, kind="update"):  # noqa: A002
        self.transfers[-1].append((sender, receiver, bytes, kind))

    def event(self, level, name, message, *, node=None, data=None):
        self.told.append((name, node, data))

    def span(self, node, name, began, seconds, *, parent=None, **attributes):
        self.spans.append((node, name, began, seconds, parent, attributes))
        return str(len(self.spans) - 1)

    def spent(self, part, seconds, node="server"):
        self.hours[-1][part] = self.hours[-1].get(part, 0.0) + seconds

    def log(self, values, /, *, node=None):
        self.logged.append((node, values))

    def log_each(self, name, values):
        self.logged += [(node, {name: value}) for node, value in values.items()]

    def bytes_of(self, number, pick=lambda sender, receiver: True):
        return sum(size for sender, receiver, size, _ in self.transfers[number] if pick(sender, receiver))


def groups_of(watcher):
    """The groups as they were told, each time that they changed."""
    return [{group: set(nodes) for group, nodes in data.items()} for name, _, data in watcher.told if name == "groups"]
