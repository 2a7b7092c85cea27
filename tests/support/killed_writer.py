# SPDX-License-Identifier: Apache-2.0
"""A process that writes numbered batches to a store until it is killed."""

import sys
from pathlib import Path

from fedvitals.records import Event, Where
from fedvitals.store import open_store
from fedvitals.store.upkeep import compaction
from support.store_contract import RUN, metric, stats

SIZE = 9


def batch(number):
    """The same records whenever it is asked, in whichever process."""
    first = number * SIZE + 1
    return [
        RUN,
        *(metric(number, f"c{i}", number + i / 10, sequence=first + i) for i in range(5)),
        *(stats(number, f"c{i}", number, first + 5 + i) for i in range(3)),
        Event(Where("r-1", number), number, "info", "round.end", "", {}, "m", first + 8),
    ]


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
