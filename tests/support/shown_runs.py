# SPDX-License-Identifier: Apache-2.0
"""Stores for tests of what people are shown: invented runs of any size, by `fedvitals_studies.bench.synthetic`."""

from pathlib import Path

from fedvitals.store import open_store
from fedvitals_studies.bench.synthetic import Synthetic, write_run

SMALL = Synthetic(clients=8, rounds=12, layers=4, every=2, run="20260101-000000-small")
LARGE = Synthetic(clients=300, rounds=120, layers=24, every=20, run="20260101-000000-large")


def invented(path: Path, size: Synthetic) -> Path:
    """The store that holds one run of that size."""
    store = open_store(path)
    write_run(store, size)
    store.close()
    return path
