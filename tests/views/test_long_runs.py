# SPDX-License-Identifier: Apache-2.0
"""What every page shows of a run is read without an object for each of its rounds."""

import tracemalloc

import numpy as np
import pytest

from fedvitals.records import Metric, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.read.federation_layers import whole_layers
from fedvitals.views.phases import phases
from fedvitals.views.status import status_of
from support.store_contract import RUN, stats, sums

ROUNDS = 2000
NAMES = ("time.round", "monitor.cost", "bottleneck.compute", "bottleneck.upload", "bottleneck.server")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "runs.db"
    told = [
        Metric(Where("r-1", number), float(number), name, 1.0 + number % 7 if name == "time.round" else 0.25, "m", 1)
        for number in range(ROUNDS)
        for name in NAMES
        if name != "bottleneck.upload" or number % 2  # measured in some rounds only
    ]
    with open_store(path) as store:
        store.write([RUN, *(Metric(m.where, m.at, m.name, m.value, "m", i) for i, m in enumerate(told, 1))])
    return path


def peak_of(work):
    work()  # what is loaded once
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_status_of_a_run_takes_150_bytes_a_round(store):
    with open_reader(store) as reader:
        status, peak = peak_of(lambda: status_of(reader, "r-1"))
    assert (status.rounds, status.first_round, status.last_round) == (ROUNDS, 0, ROUNDS - 1)
    assert status.round_seconds == 1.0 + (ROUNDS - 1) % 7
    assert status.cost_percent == pytest.approx(25 * ROUNDS / sum(1 + number % 7 for number in range(ROUNDS)))
    assert peak < 150 * ROUNDS


def test_a_few_points_of_a_runs_phases_take_250_bytes_a_round(store):
    with open_reader(store) as reader:
        shown, peak = peak_of(lambda: phases(reader, "r-1", 20))
    parts = {part.name: np.array(part.values) for part in shown.parts}
    assert shown.total == ROUNDS
    assert shown.rounds == [7 * (first // 7) + 6 for first in shown.first]  # the first of the slowest of each bucket
    np.testing.assert_allclose(parts["compute"], 7 * 0.25)
    np.testing.assert_allclose(parts["upload"], [7 * 0.25 if number % 2 else 0 for number in shown.rounds])
    np.testing.assert_allclose(sum(parts.values()), 7.0)
    assert peak < 250 * ROUNDS


def test_the_layers_of_the_federation_take_little_more_than_what_comes_out(tmp_path):
    with open_store(tmp_path / "runs.db") as store:
        for first in range(0, ROUNDS, 50):
            store.write([RUN, *(stats(number, None, number, number + 1) for number in range(first, first + 50))])
    with open_reader(tmp_path / "runs.db") as reader:
        (rounds, _, matrix), peak = peak_of(lambda: whole_layers(reader, "r-1", "gradient"))
    assert rounds == list(range(ROUNDS))
    np.testing.assert_allclose(matrix[-1], sums(ROUNDS - 1), rtol=1e-5)
    assert peak < 2.2 * matrix.nbytes
