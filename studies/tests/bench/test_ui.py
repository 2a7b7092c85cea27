# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the dashboard names the endpoints that are slow."""

from fedvitals_studies.bench.ui.bars import CALL, by_endpoint, p95_of


def test_calls_are_counted_by_endpoint_the_slowest_first():
    calls = [("/api/runs/r", 5.0), ("/api/runs/r/rounds/7?limit=2", 9.0), ("/api/runs/r/rounds/11", CALL + 1.0)]
    calls += [("/api/runs/r/findings/LABEL_NOISE~c7~~/evidence", 3.0), ("/api/runs/r", 7.0), ("/api/runs", 1.0)]
    rows = by_endpoint(calls, "r")
    assert [(row["endpoint"], row["calls"], row["median"], row["p95"], row["over the bar"]) for row in rows] == [
        ("/api/runs/RUN/rounds/N", 2, (CALL + 10.0) / 2, CALL + 1.0, 1),
        ("/api/runs/RUN", 2, 6.0, 7.0, 0),
        ("/api/runs/RUN/findings/KEY/evidence", 1, 3.0, 3.0, 0),
        ("/api/runs", 1, 1.0, 1.0, 0),
    ]
    assert p95_of([*map(float, range(1, 101))]) == 95.0
