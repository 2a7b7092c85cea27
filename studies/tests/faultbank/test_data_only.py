# SPDX-License-Identifier: Apache-2.0
"""What clients' data alone tell of the bank `quick`."""

from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.data_only import KINDS, DataFigures


def test_wrong_data_are_accused_and_healthy_ones_are_not():
    figures = DataFigures()
    for case in read_bank("quick").cases:
        figures.add(case, None)
    assert not figures.skipped
    assert figures.accused == {kind: [True] * len(figures.accused[kind]) for kind in KINDS}
    assert figures.named == figures.accused
    assert figures.alarms == figures.beside == []
    assert figures.clients > 100
    assert any("0 of" in line for line in figures.lines())
