# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: what pages will want is in memory, without a request, and nothing breaks where there is nothing."""

import time

import pytest

from fedvitals.dashboard import warming
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.store.sqlite import SqliteStore
from fedvitals.views.overview import overview
from fedvitals_studies.bench.synthetic import Synthetic, write_run
from support.waiting import wait_until

SIZE = Synthetic(clients=6, rounds=5, layers=3)


def read_ahead(cache):
    return {name for _, name in cache.matrices._used}


@pytest.mark.parametrize("named", [True, False])
def test_the_vital_signs_are_read_while_nobody_asks(tmp_path, named):
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, SIZE)
    cache = ReaderCache(tmp_path / "runs.db")
    cache.warming.asked(SIZE.run if named else None)
    with cache.reader() as reader:
        known = {reader.names.number(name) for name in warming.WANTED} - {None}
        wait_until(lambda: len(read_ahead(cache)) >= 8)
        assert read_ahead(cache) <= known
    cache.close()
    assert not cache.warming._thread.is_alive()


def test_the_first_request_keeps_what_was_read_ahead(tmp_path):
    """The first look at a store forgets what was cached of it: it has to come before reading ahead."""
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, SIZE)
    cache = ReaderCache(tmp_path / "runs.db")
    cache.warming.want()
    wait_until(lambda: len(read_ahead(cache)) >= 8)
    before = read_ahead(cache)
    cache.look()
    assert read_ahead(cache) >= before
    cache.close()


def test_the_overview_is_read_at_once_and_the_rest_waits_as_long_as_somebody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(warming, "QUIET", 3600.0)
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, SIZE)
    cache = ReaderCache(tmp_path / "runs.db")
    cache.warming.asked(SIZE.run)
    with cache.reader() as reader:
        shown = overview(reader, SIZE.run)
        wanted = {reader.names.number(name) for name in (shown.learning, shown.sign)}
    wait_until(lambda: read_ahead(cache) == wanted)
    time.sleep(0.2)
    assert read_ahead(cache) == wanted
    monkeypatch.setattr(warming, "QUIET", 0.0)  # its next look
    cache.warming._closed = True


def test_a_store_that_is_not_there_is_no_trouble(tmp_path):
    cache = ReaderCache(tmp_path / "none.db")
    cache.warming.want()
    cache.warming.want("nobody")
    wait_until(lambda: not cache.warming._wanted.is_set())
    cache.close()


def test_memory_that_answers_have_left_free_is_given_back(tmp_path, monkeypatch):
    given_back = []
    monkeypatch.setattr(warming, "GIVE_BACK", 0.01)
    monkeypatch.setattr(warming, "give_back_free_memory", lambda: given_back.append(1))
    cache = ReaderCache(tmp_path / "runs.db")
    wait_until(lambda: cache.warming.asked("r") or len(given_back) >= 3)
    cache.close()
