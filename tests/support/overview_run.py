# SPDX-License-Identifier: Apache-2.0
"""A run written down by hand, with something in every band of the overview: for tests of what the dashboard shows."""

import numpy as np

from fedvitals.records import Event, Finding, Layer, LayerStats, LayerTable, Metric, Run, Suspect, Where
from fedvitals.stats import empty_sums
from fedvitals.store import open_store

STARTED = 1.7e9
RUN = "20260101-000000-chart1"
TABLE = LayerTable("parameter", (Layer("conv.weight", (4, 4), "float32"), Layer("head.weight", (10,), "float32")))


def finding(
    node="c3", *, since=4, number=9, severity="warning", confidence=0.9, message=None, issue="LABEL_NOISE", run=RUN
):
    """What a detector would have said of a client."""
    said = message or f"{node} is unlike its peers since round {since}."
    suspects = (Suspect(node, confidence, "random wrong labels"),)
    return Finding(
        Where(run, number, node), STARTED + 10 * number, issue, severity, confidence, said, {"since": since}, suspects
    )


def written(path, *, rounds=10, clients=6, findings=(), name="charted", finished=True, names=None, more=()):
    """A store with one run. The loss of c3 is high from round 4 on; c5 takes part in every other round."""
    nodes = names or [f"c{i}" for i in range(clients)]
    config = {"rounds": rounds, "fedvitals": {"detectors": 34, "privacy": 3}}
    run = Run(
        RUN, name, config=config, started=STARTED, finished=STARTED + 10 * rounds if finished else None, tables=(TABLE,)
    )
    records = [run]
    for number in range(rounds):
        records += of_round(number, nodes)
    stamp([*records, *findings, *more], path)
    return path


def of_round(number, nodes, run=RUN):
    at, whole = STARTED + 10 * number, Where(run, number)
    told = {
        "accuracy": number / 20, "time.round": 2.0 + number % 3, "bottleneck.compute": 0.5, "bottleneck.download": 0.1,
        "bottleneck.upload": 0.2, "clients": len(nodes), "monitor.cost": 0.01, "monitor.lost": 0,
    }  # fmt: skip
    records = [Metric(whole, at, name, value) for name, value in told.items()]
    matrix = empty_sums(len(TABLE.layers))
    matrix[:, 0], matrix[:, 1], matrix[:, 2], matrix[:, 4], matrix[:, 5] = 10, 1, [4.0, 400.0 / (1 + number)], -1, 1
    records.append(LayerStats(whole, at, "gradient", matrix, TABLE.digest))
    for place, node in enumerate(nodes):
        if place == 5 and number % 2:
            continue
        ill = place == 3 and number >= 4
        own = {
            "loss": 2.0 / (1 + number) + 0.01 * place + 3.0 * ill, "update.norm": 1.0 + 0.1 * place, "steps": 5,
            "scale.gsc": 0.0 if place == 1 else 10.0 ** (place - 2), "traffic.sent": 1000, "traffic.received": 2000,
            "samples": 100,
        }  # fmt: skip
        records += [Metric(Where(run, number, node), at + 1, name, value) for name, value in own.items()]
    return records


def failed(node, number, run=RUN):
    return Event(Where(run, number, node), STARTED + 10 * number, "error", "client.failed", "It fell.")


def stamp(records, path, source="test", start=None):
    """Write the records as a monitor would."""
    from fedvitals.measurements import stamped

    begin = int(np.random.default_rng().integers(1, 2**40)) if start is None else start
    store = open_store(path)
    store.write([stamped(record, source, begin + i) for i, record in enumerate(records)])
    store.close()
