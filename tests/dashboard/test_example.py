# SPDX-License-Identifier: Apache-2.0
"""The example that ships with the dashboard is of today: its schema, its truth, and what was found in it."""

import sqlite3
from contextlib import closing

import pytest

from fedvitals.dashboard.example import PACKED, unpack
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.schema import VERSION
from fedvitals.views.cases import cases_of
from fedvitals_studies import dashboard_example


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("example"))


def test_it_has_the_present_schema_and_ships_small(store):
    with closing(sqlite3.connect(store)) as connection:
        ((version,),) = connection.execute("PRAGMA user_version")
    assert version == VERSION, "train it anew: .venv/bin/python scripts/example"
    assert PACKED.stat().st_size < 1 << 20


def test_it_is_the_federation_that_the_script_trains(store):
    with open_reader(store) as reader:
        for name, ill in (("hospitals", True), ("hospitals, all well", False)):
            wanted = dashboard_example.experiment(ill=ill)
            run = queries.find_run(reader, name)
            summary = queries.summary_of(reader, run)
            assert (summary.clients, summary.rounds) == (wanted.clients, wanted.rounds)
            assert queries.get_run(reader, run).seed == wanted.seed
            cases = cases_of(reader, run)
            assert {(case.issue, case.node, case.since) for case in cases} == (
                {("LABEL_NOISE", dashboard_example.ILL, 5)} if ill else set()
            )
