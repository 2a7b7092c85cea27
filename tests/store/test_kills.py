# SPDX-License-Identifier: Apache-2.0
"""Trainers, PostgreSQL and tapes under kill -9 lose nothing acknowledged. All kinds: `fedvitals_studies.kills`."""

import multiprocessing

import pytest

from fedvitals import Monitor
from fedvitals_studies.kills import study
from support.postgres_server import available, running


@pytest.fixture(scope="module", autouse=True)
def _no_processes_left():
    yield
    multiprocessing.forkserver._forkserver._stop()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kill", "count"),
    [(study.kill_trainer, 24), (study.kill_trainer_with_tape, 8), (study.kill_trainer_with_readers, 2)],
)
def test_a_killed_trainer_loses_nothing_that_was_acknowledged(tmp_path, kill, count):
    kills = [kill(seed, tmp_path) for seed in range(count)]
    assert [own.lost for own in kills] == [()] * count
    assert sum(own.acknowledged for own in kills) > 2 * count


@pytest.mark.thorough
@available
def test_nor_do_trainers_of_a_database_or_one_whose_server_is_killed():
    with running() as server:
        kills = [study.kill_trainers_of_postgres(seed, server) for seed in range(3)]
        kills += [study.kill_server(seed, server) for seed in range(3)]
    assert [own.lost for own in kills] == [()] * len(kills)
    assert all(own.acknowledged for own in kills)


@available
def test_a_run_with_an_id_begins_in_an_empty_database_without_a_warning(caplog):
    with running() as server, Monitor(server.database(), id="first", strict=True) as monitor, monitor.round(0):
        pass
    assert not caplog.records
