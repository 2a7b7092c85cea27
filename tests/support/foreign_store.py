# SPDX-License-Identifier: Apache-2.0
"""A store of another run that takes the place of a training's store, and a process that writes it."""

import sys
from pathlib import Path

from fedvitals.errors import StoreError
from fedvitals.records import Metric, Run, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.read import queries
from support.store_contract import metric

OTHER = Run("r-other", "other", started=50.0, source="o", sequence=0)


def batch(number, size=20):
    return [metric(number, f"c{i}", float(i), sequence=1 + number * size + i) for i in range(size)]


def make_other(path):
    """A finished store with somebody else's run."""
    with open_store(path) as store:
        values = [Metric(Where(OTHER.id, i, "c0"), float(i), "loss", 0.5, "o", 1 + i) for i in range(50)]
        store.write([OTHER, *values])
    return path.read_bytes()


def other_process(path):
    """Make a new store of this name, whatever lies there, and write to it until the input is closed."""
    values = [Metric(Where(OTHER.id, i), i, "loss", 0.5, "o", 1 + i) for i in range(51)]
    store = None
    while store is None:
        try:
            if "--clear" in sys.argv:
                for file in path.parent.glob(f"{path.name}*"):
                    file.unlink(missing_ok=True)
            store = open_store(path)
            store.write([OTHER, *values[:50]])
        except StoreError:  # the training was faster
            store = None
    print("written", flush=True)  # noqa: T201
    sys.stdin.read()
    store.write(values[50:])
    store.close()


def runs_and_rounds(path):
    with open_reader(path) as reader:
        return {run.id: reader.history(run.id).rounds() for run in queries.list_runs(reader)}


if __name__ == "__main__":
    other_process(Path(sys.argv[1]))
