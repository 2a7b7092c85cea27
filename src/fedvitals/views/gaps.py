# SPDX-License-Identifier: Apache-2.0
"""Says what was not judged in a stored run, and why."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.diagnosis.gaps import DETECTOR, MONITOR_ERROR, MonitorFailure, gaps, monitor_failure_of
from fedvitals.store import spill_folder
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.transport.spill import waiting_runs

LIVE = (DETECTOR, "taking a finding")  # failures of the detectors that looked during the run


def gaps_of(reader: Reader, run: str, again: Sequence[MonitorFailure] | None = None) -> tuple[str, ...]:
    """Say why the run's findings may be incomplete; empty when every detector saw everything.

    `again`: what failed when detectors looked at the store again, in place of what failed in those that looked live.
    What could not be measured or recorded is missing then as well.
    """
    warnings = queries.warnings_of(reader, run, (MONITOR_ERROR, queries.TELEMETRY_LOST))
    errors = [event for event in warnings if event.name == MONITOR_ERROR]
    failures = [failure for event in errors if (failure := monitor_failure_of(event)) is not None]
    if again is not None:
        failures = [*again, *(failure for failure in failures if not failure.doing.startswith(LIVE))]
    reasons = gaps(failures, *queries.left_out(reader, run, warnings))
    if reader.database.dialect.name == "sqlite" and run in waiting_runs(spill_folder(reader.database.target)):
        reasons = (*reasons, "some of its records wait beside the store (`fedvitals doctor --mend` takes them back)")
    return reasons
