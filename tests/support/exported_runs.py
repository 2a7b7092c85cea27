# SPDX-License-Identifier: Apache-2.0
"""A small run with everything that exporters show, and a large one, made of records alone: what their tests share."""

from __future__ import annotations

import numpy as np

from fedvitals.measurements import stamped
from fedvitals.records import Event, Finding, Layer, LayerStats, LayerTable, Metric, Run, Span, Suspect, Transfer, Where
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT, empty_sums

RUN = "20261115-120000-abc123"
STARTED = 1.79e9
TABLE = LayerTable("parameter", (Layer("fc.weight", (3, 8), "float32"), Layer("fc.bias", (3,), "float32")))


def histogram_row(*values: float) -> np.ndarray:
    """A row of the family `gradient.histogram` that counts these values."""
    row = np.zeros(2 * EXPONENTS)
    for value in values:
        place = int(np.floor(np.log2(abs(value)))) - LOWEST_EXPONENT
        row[place + (EXPONENTS if value > 0 else 0)] += 1
    return row


def run_of(*, finished: bool = False, name: str = "digits", run: str = RUN) -> Run:
    return Run(
        run,
        name,
        "lab",
        "star",
        {"lr": 0.1, "local": {"epochs": 2}},
        7,
        STARTED,
        STARTED + 60 if finished else None,
        {"torch": "2"},
        (TABLE,),
    )


def round_of(number: int, clients: int = 3, run: str = RUN) -> list:
    """What one round gives: clients, the whole, layers, bytes; c1 stands out, and is found."""
    at = STARTED + 10 * number
    records: list = []
    for i in range(clients):
        where = Where(run, number, f"c{i}")
        norm = 50.0 if i == 1 else 1.0 + i / clients
        values = {"loss": 1.0 / (number + 1), "update.norm": norm, "time.client": 0.5, "user.f1 score": 0.25}
        records += [Metric(where, at, name, value) for name, value in values.items()]
        records.append(Transfer(where, at, f"c{i}", "server", 100, 400))
    whole = Where(run, number)
    sums = empty_sums(2)
    sums[0] = 24, 12.0, 30.0, 14.0, -1.0, 2.0, 0, 0, 0
    sums[1] = 3, 3.0, 3.0, 3.0, 1.0, 1.0, 0, 0, 0
    bins = np.stack([histogram_row(-0.5, 0.25, 0.3, 2.0), histogram_row(1.0, 1.5, 1.75)])
    records += [
        Metric(whole, at + 1, "accuracy", 0.5 + number / 10),
        Metric(whole, at + 1, "clients.failed", 1.0),
        Metric(whole, at + 1, "monitor.lost", 3.0),
        LayerStats(whole, at + 1, "gradient", sums, TABLE.digest),
        LayerStats(whole, at + 1, "gradient.histogram", bins, TABLE.digest),
        Event(Where(run, number, "c2"), at + 1, "error", "client.failed", "boom"),
        Finding(Where(run, number, "c1"), at + 1, "UPDATE_TOO_LARGE", "critical", 0.9, "c1 <b>|stands</b> out", {},
                (Suspect("c1", 0.9),)),
        Span(whole, at, "round", 4.0, "0" * 32, f"{number:016x}", None, {"parts": {"wait": 3.0}}),
        Metric(whole, at + 2, "time.round", 4.0),
    ]  # fmt: skip
    return records


def small(rounds: int = 3, clients: int = 3, run: str = RUN, name: str = "digits") -> list:
    """A whole run, each record with its identity."""
    records = [run_of(run=run, name=name)]
    for number in range(rounds):
        records += round_of(number, clients, run)
    records.append(run_of(finished=True, run=run, name=name))
    return [stamped(record, "monitor", i) for i, record in enumerate(records)]
