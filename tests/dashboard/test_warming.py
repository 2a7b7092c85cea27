# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: what pages will want is in memory, without a request, and nothing breaks where there is nothing."""

import time

import pytest

pytest.importorskip("fastapi")

from fedvitals.dashboard import warming
from fedvitals.dashboard.reader_cache import Shelf
from fedvitals.store.sqlite import SqliteStore
from fedvitals_studies.bench.synthetic import Synthetic, write_run
from support.waiting import wait_until

SIZE = Synthetic(clients=6, rounds=5, layers=3)


def read_ahead(shelf):
    return {name for _, name in shelf.matrices._used}


@pytest.mark.parametrize("named", [True, False])
def test_the_vital_signs_are_read_while_nobody_asks(tmp_path, named):
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, SIZE)
    shelf = Shelf(tmp_path / "runs.db")
    shelf.warming.asked(SIZE.run if named else None)
    with shelf.reader() as reader:
        known = {reader.names.number(name) for name in warming.WANTED} - {None}
        wait_until(lambda: len(read_ahead(shelf)) >= 8)
        assert read_ahead(shelf) <= known
    shelf.close()
    assert not shelf.warming._thread.is_alive()


def test_it_stands_back_as_long_as_somebody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(warming, "QUIET", 3600.0)
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, SIZE)
    shelf = Shelf(tmp_path / "runs.db")
    shelf.warming.asked(SIZE.run)
    wait_until(lambda: shelf.warming._thread is not None)
    time.sleep(0.2)
    assert read_ahead(shelf) == set()
    monkeypatch.setattr(warming, "QUIET", 0.0)  # its next look
    shelf.warming._closed = True


def test_a_store_that_is_not_there_is_no_trouble(tmp_path):
    shelf = Shelf(tmp_path / "none.db")
    shelf.warming.want()
    shelf.warming.want("nobody")
    wait_until(lambda: not shelf.warming._wanted.is_set())
    shelf.close()
