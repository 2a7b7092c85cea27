# SPDX-License-Identifier: Apache-2.0
"""What was not judged in a stored run."""

from __future__ import annotations

from fedvitals.diagnosis.gaps import MONITOR_ERROR, failure_of, gaps
from fedvitals.store import queries
from fedvitals.store.reader import Reader


def gaps_of(reader: Reader, run: str) -> tuple[str, ...]:
    """Why the run's findings may not be all, in words; empty when every detector saw everything."""
    failures = (failure_of(event) for event in reader.history(run).events(MONITOR_ERROR))
    return gaps((failure for failure in failures if failure is not None), queries.lost_records(reader, run))
