# SPDX-License-Identifier: Apache-2.0
"""The queue: training never waits for a sink, order is kept, and what is lost is counted."""

from __future__ import annotations

import os
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals.records import Metric, Run
from fedvitals.transport.queue import BATCH, Queue
from fedvitals.transport.spill import drain_spill
from support.sinks import Hanging, Keeping, ending_queues, error, metric
from support.waiting import PATIENCE, wait_until


@pytest.fixture
def make_queue():
    with ending_queues() as make:
        yield make


# --- the normal way --------------------------------------------------------------------------------------------------


def test_records_arrive_in_order_and_in_batches(make_queue):
    sink = Keeping()
    queue = make_queue(sink, strict=True)
    assert queue._thread is None  # nothing runs before the first record
    queue.put_many(metric(i) for i in range(5 * BATCH))
    assert queue._thread.name == "fedvitals-keeping"
    assert queue._thread.daemon
    assert queue.flush() is True
    assert [record.value for record in sink.records] == list(range(5 * BATCH))
    assert max(sink.batches) <= BATCH
    assert queue.pending == 0
    assert queue.lost == {}


def test_a_lone_record_is_written_without_a_flush(make_queue):
    sink = Keeping()
    make_queue(sink).put(metric(1))
    wait_until(lambda: sink.records)


def test_important_records_go_first_so_that_the_run_precedes_its_metrics(make_queue):
    sink = Keeping()
    queue = make_queue(sink)
    queue.put_many([metric(1), Run("run", "digits"), metric(2)])
    queue.flush()
    assert isinstance(sink.records[0], Run)


def test_close_writes_the_rest_ends_the_thread_and_closes_the_sink_there(make_queue):
    sink = Keeping()
    queue = make_queue(sink)
    queue.put_many(metric(i) for i in range(10))
    thread = queue._thread
    queue.close()
    queue.close()
    assert len(sink.records) == 10
    assert not thread.is_alive()
    assert sink.closed_by == ["fedvitals-keeping"]
    queue.put(metric(11))  # too late, but no reason to stop training
    assert queue.lost == {"closed": 1}


def test_a_queue_that_got_nothing_still_closes_its_sink(make_queue):
    sink = Keeping()
    make_queue(sink).close()
    assert sink.closed_by == [threading.current_thread().name]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from(["c1", "c2", "c3"]), st.booleans()), max_size=300), max_size=4))
def test_order_within_a_node_is_kept_within_each_class(plans):
    sink = Keeping()
    queue = Queue(sink, strict=True)

    def train(thread: int, plan) -> None:
        for number, (node, important) in enumerate(plan):
            name = f"{node}-{thread}"
            queue.put(error(number, name) if important else metric(number, name))

    threads = [threading.Thread(target=train, args=each) for each in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.flush()
    queue.close()
    seen = defaultdict(list)
    for record in sink.records:
        number = record.value if isinstance(record, Metric) else record.at
        seen[type(record), record.where.node].append(number)
    assert [*seen.values()] == [sorted(numbers) for numbers in seen.values()]
    assert len(sink.records) == sum(map(len, plans))


# --- full queues -----------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_the_oldest_bulk_records_and_counts_them(make_queue):
    sink = Hanging()
    queue = make_queue(sink, bulk=100)
    queue.put(metric(-1))
    assert sink.entered.wait(PATIENCE)
    queue.put_many(metric(i) for i in range(250))
    assert queue.lost == {"queue full": 150}
    assert queue.pending == 101
    sink.go.set()
    assert queue.flush() is False  # not everything was written
    assert [record.value for record in sink.records] == [-1, *range(150, 250)]


def test_important_records_spill_to_a_file_and_come_back_in_order(make_queue, tmp_path):
    sink = Hanging()
    queue = make_queue(sink, spill=tmp_path / "runs.db.d", important=10, strict=True)
    queue.put(error(0))
    assert sink.entered.wait(PATIENCE)
    queue.put_many(error(i) for i in range(1, 5000))
    assert queue.pending == 5000
    [file] = (tmp_path / "runs.db.d").iterdir()
    assert file.stat().st_size > 0
    assert list(drain_spill(file.parent)) == []  # its queue is alive
    sink.go.set()
    assert queue.flush() is True
    assert sink.records == [error(i) for i in range(5000)]
    queue.put_many(error(i) for i in range(5000, 5005))  # and memory is used again
    assert queue.flush() is True
    assert sink.records[-1] == error(5004)
    assert file.stat().st_size == 0
    queue.close()
    assert not file.exists()


def test_a_second_overflow_is_not_read_from_an_old_buffer(make_queue, tmp_path):
    sink = Keeping()
    queue = make_queue(sink, spill=tmp_path, important=2)
    for wave in range(3):
        sink.trouble = OSError("down")
        queue.put(error(wave * 100))
        wait_until(lambda: sink.attempts and queue._held)
        queue.put_many(error(wave * 100 + i) for i in range(1, 50))
        sink.trouble = None
        assert queue.flush()
    assert [record.at for record in sink.records] == [wave * 100 + i for wave in range(3) for i in range(50)]


def test_important_records_without_a_folder_or_a_disk_are_counted(make_queue, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for spill, cause in ((None, "queue full"), (tmp_path / "file", "spill failed")):
        sink = Hanging()
        queue = make_queue(sink, spill=spill, important=5)
        queue.put(error(0))
        assert sink.entered.wait(PATIENCE)
        queue.put_many(error(i) for i in range(1, 9))
        assert queue.lost == {cause: 3}
        sink.go.set()
        assert queue.flush() is False
        assert [record.at for record in sink.records] == [0, 1, 2, 3, 4, 5]


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_inherits_nor_writes(make_queue, tmp_path):
    sink = Hanging()
    queue = make_queue(sink, spill=tmp_path, important=1)
    queue.put_many([error(0)])
    assert sink.entered.wait(PATIENCE)
    queue.put_many([error(1), error(2), metric(1)])
    size = next(tmp_path.iterdir()).stat().st_size
    child = os.fork()
    if child == 0:
        fresh = (queue.pending, dict(queue.lost), queue._thread) == (0, {}, None)
        queue.put_many([metric(5), error(5)])
        detached = queue.lost == {"forked": 2} and queue.pending == 0 and queue.flush() is False
        queue.close()
        quiet = not sink.closed_by and threading.active_count() == 1
        os._exit(0 if fresh and detached and quiet else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(tmp_path.iterdir()).stat().st_size == size
    assert list(drain_spill(tmp_path)) == []  # the child's end did not free the parent's file
    sink.go.set()
    assert queue.flush()
    assert sink.records == [error(0), error(1), metric(1), error(2)]
