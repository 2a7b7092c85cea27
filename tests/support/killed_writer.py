# SPDX-License-Identifier: Apache-2.0
"""A process that writes numbered batches to a store until it is killed."""

import sys
from pathlib import Path

import numpy as np

from fedvitals.measurements import MeasuredLayers, Measurements
from fedvitals.records import Event, Where
from fedvitals.store import open_store
from fedvitals.store.upkeep import compaction
from support.store_contract import RUN, metric, stats

SIZE = 9


def batch(number):
    """The same records whenever it is asked, in whichever process; every other batch has them as measurements."""
    first = number * SIZE + 1
    records = [
        *(metric(number, f"c{i}", number + i / 10, sequence=first + i) for i in range(5)),
        *(stats(number, f"c{i}", number, first + 5 + i) for i in range(3)),
    ]
    return [
        RUN,
        *([measured(records)] if number % 2 else records),
        Event(Where("r-1", number), number, "info", "round.end", "", {}, "m", first + 8),
    ]


def measured(records):
    """The metrics and layer statistics of a batch as one block of measurements."""
    metrics, layers = records[:5], records[5:]
    nodes, values = tuple(m.where.node for m in metrics), np.array([[m.value] for m in metrics])
    matrices = np.stack([part.matrix for part in layers])
    of_layers = MeasuredLayers(layers[0].family, layers[0].table, None, (0, 1, 2), matrices)
    place = (RUN.id, metrics[0].where.round, metrics[0].at, nodes, (None,) * 5, (metrics[0].name,))
    return Measurements(
        *place, values, np.ones((5, 1), bool), None, (of_layers,), source="m", sequence=metrics[0].sequence
    )


def child(path):
    """Write for ever; say the number of a batch once it is written."""
    compaction.CHUNK_ROUNDS = 4  # so that some of the kills fall into a compaction
    store = open_store(path)
    for number in range(100_000):
        store.write(batch(number))
        store.flush()
        print(number, flush=True)  # noqa: T201


if __name__ == "__main__":
    child(Path(sys.argv[1]))
