# SPDX-License-Identifier: Apache-2.0
"""The bench of the detectors looks at what it says: 100 clients with 20 layers, round after round."""

import pytest

from fedvitals.diagnosis.live_detectors import ROUND_COMPLETE
from fedvitals_studies.bench.diagnosis import CLIENTS, LAYERS, bench_diagnosis, round_times


@pytest.mark.thorough
def test_detectors_see_as_many_clients_and_layers_as_the_bar_asks_for():
    seen = []

    def looks(history, number):
        nodes, gradients = history.across("gradient", ("rms",), number)
        clients = [node for node in nodes if node != "server"]
        seen.append((number, len(clients), gradients.shape[1], len(history.latest("update.norm", number))))
        assert history.series(ROUND_COMPLETE, None)[0] == list(range(number + 1))
        yield from ()

    times = round_times(3, [looks])
    assert seen == [(number, CLIENTS, LAYERS, CLIENTS) for number in range(3)]
    assert list(times) == [0, 1, 2]


@pytest.mark.thorough
def test_a_row_says_how_long_and_whether_that_meets_the_bar():
    (row,) = bench_diagnosis(quick=True)
    assert row["after_rounds"] == 5
    assert 0 < row["milliseconds"] <= row["largest"]
    share = row["milliseconds"] / 1000 / row["paper_round_seconds"]
    assert row["percent_of_paper_round"] == 100 * share
    assert row["verdict"] == ("met" if row["milliseconds"] <= row["bar_milliseconds"] == 15 else "missed")
