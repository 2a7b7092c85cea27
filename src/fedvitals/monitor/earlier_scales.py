# SPDX-License-Identifier: Apache-2.0
"""Gives a run's detectors the gradient scale of earlier runs of the same model, as an event stored with the run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from fedvitals.errors import EmptyStoreError
from fedvitals.records import EARLIER_SCALES, Event, Run, Where
from fedvitals.store import open_reader, store_target
from fedvitals.store.read.earlier_runs import earlier_runs

RUNS = 3  # the number of earlier runs that a new run is compared with


def earlier_scales(store: str | os.PathLike[str] | None, run: Run) -> Event | None:
    """Return the gradient scales of the newest runs with the same layers, names and shapes; None if there are none."""
    target = None if store is None else store_target(store)
    if target is None or (isinstance(target, Path) and not target.exists()):
        return None
    with contextlib.suppress(EmptyStoreError), open_reader(target) as reader:
        runs = earlier_runs(reader, run, "scale.gsc", RUNS)
        if runs:
            data = [
                {"id": each.id, "name": each.name, "levels": {str(r): value for r, value in each.levels.items()}}
                for each in runs
            ]
            text = f"The store has {len(runs)} earlier runs of this model to compare the gradient scale with."
            return Event(Where(run.id), time.time(), "info", EARLIER_SCALES, text, {"runs": data})
    return None
