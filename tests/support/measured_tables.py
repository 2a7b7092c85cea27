# SPDX-License-Identifier: Apache-2.0
"""Measurements of a few clients, and how they are compared with single records."""

import dataclasses
import math

import numpy as np

from fedvitals.measurements import Transfers, stamped
from fedvitals.probes.results import Results, measurements_of
from fedvitals.records import Layer, LayerTable, Run
from fedvitals.stats import STATISTICS

TABLE = LayerTable("parameter", (Layer("a", (2, 2), "float32"), Layer("b", (3,), "float32")))
RUN = Run("r", "r", tables=(TABLE,), source="s", sequence=0)


def same(left, right):
    """Records that are equal, NaN included; matrices to the float32 of wire and store."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if field.name in ("matrix", "values", "value"):
                np.testing.assert_allclose(x, y, rtol=1e-6, equal_nan=True)
            else:
                assert x == y, field.name


def sums(rng):
    """The nine sums of two layers of five values each."""
    values = rng.normal(size=(2, 5))
    rows = [values.sum(1), (values**2).sum(1), np.abs(values).sum(1), values.min(1), values.max(1)]
    made = np.stack([np.full(2, 5.0), *rows, *np.zeros((3, 2))], axis=1)
    assert made.shape[1] == len(STATISTICS)
    return made


def results(rng, *, sketch=True, step=None, absent=False):
    made = Results(tables={"parameter": TABLE.digest})
    made.take({"loss": rng.normal(), "gradient.norm": math.nan if absent else rng.random()})
    made.take({"gradient.norm_max": rng.random()}, step=int(rng.integers(0, 9)) if step is None else step)
    if not absent:
        made.take({"samples": 32.0, "update.norm": 1.0, "user.mine": -1.5})
    made.matrices.append(("gradient", sums(rng), None))
    made.matrices.append(("gradient", sums(rng), 3))
    if sketch:
        made.sketch = rng.normal(size=256)
    return made


def measured(clients=4, seed=0, *, round_index=2, nodes=None):
    rng = np.random.default_rng(seed)
    names = nodes or [f"c{i}" for i in range(clients)]
    rows = [((node, None if i % 2 else "edge-0"), results(rng, absent=i == 1)) for i, node in enumerate(names)]
    table = measurements_of("r", round_index, 5.0, rows, lambda *_: TABLE.digest)
    return stamped(table, "s", 10)


def messages(clients=3, *, round_index=2):
    """A model to each client, and an update from it."""
    nodes = [f"c{i}" for i in range(clients) for _ in range(2)]
    ends = [[("server", f"c{i}"), (f"c{i}", "server")] for i in range(clients)]
    senders, receivers = zip(*(pair for own in ends for pair in own), strict=True)
    count = len(nodes)
    place = ("r", round_index, nodes, ["edge-0", None] * clients, [5.0 + i for i in range(count)])
    sizes = ([*range(count)], [2 * i for i in range(count)], [None, 0.5] * clients)
    return stamped(Transfers(*place, senders, receivers, *sizes, ["model", "update"] * clients), "s", 100)
