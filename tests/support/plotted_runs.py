# SPDX-License-Identifier: Apache-2.0
"""Runs for pictures and reports: one with everything in it, one whose names are hostile, one that is empty."""

import math

import numpy as np

from fedvitals.measurements import stamped
from fedvitals.records import (
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Span,
    Suspect,
    Transfer,
    Where,
)
from fedvitals.stats import empty_sums
from fedvitals.store import open_store
from fedvitals_studies.bench.synthetic import Synthetic, write_run

NASTY = "<script>alert(1)</script>"
MATHS = r"$\frac{"
MARKED = "**a** `b` [c](http://evil.example/x.js) |d| <br> &amp; _e_"
NAMES = (f"c0{NASTY}", f"c1{MATHS}$", f"c2{MARKED}", "c3\x1b[31m\x00\n\u202e", "c4😀日本", "c5" + 300 * "x", "c6", "c7")
FULL, HOSTILE, EMPTY = "synthetic", "hostile-1", "empty-1"
ROUNDS, CLIENTS = 12, 8


def write(store):
    """All three into one store."""
    sink = open_store(store)
    write_run(sink, Synthetic(clients=CLIENTS, rounds=ROUNDS, layers=4, every=4))
    records = [*_gradient_scale(), *_hostile(), Run(EMPTY, "empty", started=1.75e9)]
    sink.write([stamped(record, "pictured", place + 1) for place, record in enumerate(records)])
    sink.close()
    return store


def _gradient_scale():
    """Of the full run, which has none: with a 0, a NaN and an infinity among its values."""
    odd = {(3, 0): 0.0, (4, 1): math.nan, (5, 2): math.inf}
    for number in range(ROUNDS):
        for client in range(CLIENTS):
            value = odd.get((number, client), 10.0 ** (number / 3 - 2) * (1 + client / 10))
            yield Metric(Where(FULL, number, f"c{client}"), 1.75e9 + number, "scale.gsc", value)


def _hostile():
    run, at = HOSTILE, 1.75e9
    table = LayerTable("parameter", (Layer(f"0.{NASTY}", (2, 2), "float32"), Layer(f"1.{MATHS}", (2, 2), "float32")))
    yield Run(
        run, f"{NASTY} {MATHS} {MARKED}", "lab", NASTY, {"fedvitals": {"detectors": 3}, NASTY: MARKED}, 7, at, at + 9,
        {"torch": NASTY}, (table,),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    for number in range(5):
        here, when = Where(run, number), at + number
        yield Metric(here, when, "accuracy", 0.1 * number)
        yield Metric(here, when, f"user.{NASTY}", 1.0)
        yield Metric(here, when, "time.round", 1.0)
        yield Span(here, when, "round", 1.0, "t" * 32, f"{number:016d}")
        for place, node in enumerate(NAMES):
            spot = Where(run, number, node)
            for name in ("loss", "update.norm", "steps", "scale.gsc", f"user.{NASTY}"):
                yield Metric(spot, when, name, math.nan if place == 2 and number == 3 else 1.0 + place + number)
            yield Sketch(spot, when, tuple(rng.normal(size=16).tolist()))
            yield Span(
                spot, when, "client", 0.1, "t" * 32, f"c{number:07d}{place:08d}", None, {"parts": {"forward": 0.1}}
            )
            yield Transfer(spot, when, node, "server", 1000, 1000)
        sums = empty_sums(2)
        sums[:, :6] = (4, 0.1, 1.0, 0.5, -1, 1)
        yield LayerStats(here, when, "gradient", sums, table.digest)
        yield Finding(
            Where(run, number, NAMES[0], layer=f"0.{NASTY}"), when, "LABEL_NOISE", "warning", 0.9, MARKED + NASTY,
            {"numbers": [{"name": NASTY, "value": 1.0, "usual": 0.5, "of": NASTY, "score": 3.0}], NASTY: MARKED},
            (Suspect(NAMES[0], 0.9, NASTY),),
        )  # fmt: skip
        yield Finding(Where(run, number, NAMES[1]), when, f"OWN {NASTY}", "warning", 0.7, f"{MATHS} {MARKED}")
        yield Event(
            Where(run, number, NAMES[0]), when, "error", "client.failed", NASTY, {"traceback": f"x\n```\n{NASTY}"}
        )
