# SPDX-License-Identifier: Apache-2.0
"""What was not judged in a stored run."""

from __future__ import annotations

from fedvitals.diagnosis.gaps import MONITOR_ERROR, failure_of, gaps
from fedvitals.store import queries, spill_folder
from fedvitals.store.reader import Reader
from fedvitals.telemetry.spill import waiting_runs


def gaps_of(reader: Reader, run: str) -> tuple[str, ...]:
    """Why the run's findings may not be all, in words; empty when every detector saw everything."""
    errors = queries.events(reader, run, level="warning", name=MONITOR_ERROR)
    failures = (failure_of(event) for event in errors)
    reasons = gaps((failure for failure in failures if failure is not None), queries.lost_records(reader, run))
    if reader.database.dialect.name == "sqlite" and run in waiting_runs(spill_folder(reader.database.target)):
        reasons = (*reasons, "some of its records wait beside the store (`fedvitals doctor --mend` takes them back)")
    return reasons
