# SPDX-License-Identifier: Apache-2.0
"""What is kept of clients has a bound, and belongs to the client it was written for."""

import numpy as np

from fedvitals.diagnosis.evidence.client_table import ClientTable


def test_a_client_gets_back_what_was_written_for_it() -> None:
    table, chance, expected = ClientTable(), np.random.default_rng(1), dict[str, float]()
    column = table.column(fill=-1.0)
    for number in range(60):
        nodes = [f"c{i}" for i in chance.choice(200, size=20, replace=False)]
        rows = table.rows_of(nodes)
        assert column.values[rows].tolist() == [expected.get(node, -1.0) for node in nodes]
        column.values[rows] = number + np.arange(20) / 100
        expected |= dict(zip(nodes, column.values[rows].tolist(), strict=True))
    assert set(table) == set(expected)


def test_those_absent_longest_are_forgotten_beyond_the_bound() -> None:
    table = ClientTable(most=50)
    column = table.column((3,))
    newest: dict[str, int] = {}
    chance = np.random.default_rng(2)
    for number in range(300):
        nodes = [f"c{i}" for i in chance.choice(1000, size=10, replace=False)]
        known = {node for node in nodes if node in table}
        rows = table.rows_of(nodes)
        fresh = np.array([node not in known for node in nodes])
        assert not column.values[rows[fresh]].any()
        column.values[rows] = number + 1
        newest |= dict.fromkeys(nodes, number)
        assert len(table) <= 50
        assert table.capacity <= 50
        assert len(column.values) == table.capacity
        assert len({table.row_of(node) for node in table}) == len(table)
        oldest = min(newest[node] for node in table)
        assert all(newest[node] <= oldest for node in table.forgotten)


def test_a_cohort_beyond_the_bound_is_remembered_whole_and_leaves_no_gap() -> None:
    table = ClientTable(most=8)
    column = table.column()
    table.rows_of([f"a{i}" for i in range(20)])
    assert len(table) == 20
    for number in range(30):
        rows = table.rows_of([f"b{number}-{i}" for i in range(4)])
        assert len(set(rows.tolist())) == 4
        assert len(table) <= 8
    assert table.capacity == len(column.values) == 20
