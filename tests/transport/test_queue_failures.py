# SPDX-License-Identifier: Apache-2.0
"""A sink that fails, hangs or refuses costs training nothing, and what it costs in records is counted."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time

import pytest

from fedvitals.errors import FedvitalsError, RecordError
from fedvitals.transport import queue as queue_module
from fedvitals.transport.queue import Queue
from fedvitals.transport.spill import drain_spill, waiting_runs
from support.sinks import Hanging, Keeping, ending_queues, error, metric
from support.waiting import PATIENCE, wait_until


@pytest.fixture
def make_queue():
    with ending_queues() as make:
        yield make


@pytest.fixture
def quick(monkeypatch):
    """Back-off of milliseconds instead of seconds."""
    monkeypatch.setattr(queue_module, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(queue_module, "LONGEST_DELAY", 0.01)


def test_a_failing_sink_is_reported_once_retried_and_loses_nothing(make_queue, quick, caplog):
    sink = Keeping(OSError("disk full"))
    queue = make_queue(sink)
    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        queue.put_many(metric(i) for i in range(10))
        wait_until(lambda: sink.attempts > 3)
        sink.trouble = TimeoutError("slow")
        attempts = sink.attempts
        wait_until(lambda: sink.attempts > attempts + 2)
        sink.trouble = None
        assert queue.flush() is True
        queue.close()
    assert [record.value for record in sink.records] == list(range(10))
    assert queue.lost == {}
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3
    assert "OSError: disk full" in messages[0]
    assert "TimeoutError: slow" in messages[1]
    assert "works again" in messages[2]


def test_delays_double_up_to_a_limit(make_queue, monkeypatch):
    delays = []
    failed = Queue._failed

    def noting(self, trouble, delay) -> None:
        delays.append(delay)
        self._hurry = True
        failed(self, trouble, 0)

    monkeypatch.setattr(Queue, "_failed", noting)
    sink = Keeping(OSError())
    make_queue(sink).put(metric(1))
    wait_until(lambda: len(delays) > 8)
    assert delays[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_flush_after_closing_does_not_wait_for_what_was_spilled(make_queue, quick, tmp_path):
    """After a run whose store could not be written to, each `monitor.findings()` waited 31 s."""
    queue = make_queue(Keeping(OSError("down")), spill=tmp_path)
    queue.put_many([error(1), metric(1)])
    queue.close()
    written = []
    flushing = threading.Thread(target=lambda: written.append(queue.flush(None)), daemon=True)
    flushing.start()
    flushing.join(PATIENCE)
    assert written == [False]


@pytest.mark.parametrize("timeout", [None, 0.05, 30.0])
def test_flush_gives_up_on_a_sink_that_keeps_failing(make_queue, quick, timeout):
    sink = Keeping(OSError("down"))
    queue = make_queue(sink)
    queue.put(metric(1))
    assert queue.flush(timeout) is False
    assert sink.attempts < 500  # in 30 s, or for ever, it would try thousands of times
    assert queue.pending == 1  # still waiting for better times


def test_flush_gives_up_on_a_hanging_sink_and_other_queues_go_on(make_queue):
    hanging, working = Hanging(), Keeping()
    stuck, free = make_queue(hanging), make_queue(working)
    for queue in (stuck, free):
        queue.put(metric(1))
    assert stuck.flush(0.05) is False
    assert free.flush(PATIENCE) is True
    stuck.close(timeout=0.1)
    assert stuck._thread.is_alive()  # it was left there, within the sink
    assert hanging.records == []
    assert stuck.lost == {"sink failed": 1}


def test_poisonous_records_are_left_out_and_the_others_written(make_queue, caplog):
    sink = Keeping(poisonous=lambda record: record.value in (3, 77, 78))
    queue = make_queue(sink)
    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        queue.put_many(metric(i) for i in range(100))
        assert queue.flush() is False
        queue.close()
    assert [record.value for record in sink.records] == [i for i in range(100) if i not in (3, 77, 78)]
    assert queue.lost == {"bad record": 3}
    assert len(caplog.records) == 1


def test_at_close_what_the_sink_did_not_take_is_left_for_the_next_process(make_queue, quick, tmp_path):
    queue = make_queue(Keeping(OSError("down")), spill=tmp_path)
    queue.put_many([error(1), metric(1), metric(2), error(2)])
    wait_until(lambda: queue._failures)
    queue.put_many([error(3), metric(3)])
    queue.close(timeout=PATIENCE)
    assert not queue._thread.is_alive()
    assert queue.lost == {}
    assert waiting_runs(tmp_path) == {"run"}
    assert list(drain_spill(tmp_path, sink="another")) == []
    assert list(drain_spill(tmp_path, sink="keeping")) == [error(1), error(2), error(3)]
    assert list(drain_spill(tmp_path)) == [metric(1), metric(2), metric(3)]
    assert list(tmp_path.iterdir()) == []


def test_a_failing_sink_costs_no_bulk_that_the_disk_has_room_for(make_queue, quick, tmp_path):
    sink = Keeping(OSError("down"))
    queue = make_queue(sink, spill=tmp_path, bulk=4000)
    for first in range(0, 20_000, 400):
        queue.put_many(metric(i) for i in range(first, first + 400))
        wait_until(lambda: queue._bulk_room < 1000)
    assert queue.pending == 20_000
    sink.trouble = None
    assert queue.flush() is True
    assert [record.value for record in sink.records] == list(range(20_000))
    queue.put(metric(20_000))
    queue.close(timeout=PATIENCE)
    assert len(sink.records) == 20_001
    assert (queue.lost, queue.thinned.detail, list(tmp_path.iterdir())) == ({}, 0, [])


def test_bulk_beyond_the_bound_of_the_file_is_lost_and_counted(make_queue, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(queue_module, "BULK_BYTES", 10_000)
    queue = make_queue(Keeping(OSError("down")), spill=tmp_path, bulk=4000)
    for first in range(0, 40_000, 400):
        queue.put_many(metric(i) for i in range(first, first + 400))
        time.sleep(0.002)
    queue.close(timeout=PATIENCE)
    spilled = list(drain_spill(tmp_path))
    assert 0 < len(spilled) < 40_000
    assert len(spilled) + sum(queue.lost.values()) == 40_000


def test_strict_flush_and_close_raise_what_the_worker_met(make_queue):
    sink = Keeping(OSError("down"))
    queue = make_queue(sink, strict=True)
    queue.put(metric(1))
    with pytest.raises(OSError, match="down"):
        queue.flush()
    sink.trouble = None
    assert queue.flush() is True  # nothing was lost after all
    sink.trouble = OSError("down again")
    queue.put(metric(2))
    with pytest.raises(OSError, match="down again"):
        queue.close()
    assert queue.lost == {"sink failed": 1}
    queue.close()


def test_strict_raises_for_a_full_queue_and_a_poisonous_record(make_queue):
    full = make_queue(Keeping(), bulk=1, strict=True)
    with full._lock:  # so that the worker cannot be faster
        full.put_many([metric(1), metric(2)])
    with pytest.raises(FedvitalsError, match="'keeping' lost records \\(queue full\\)"):
        full.flush()
    assert full.flush() is False  # raised once; the loss remains

    poisoned = make_queue(Keeping(poisonous=lambda _: True), strict=True)
    poisoned.put(metric(1))
    with pytest.raises(RecordError, match="poison"):
        poisoned.flush()


def test_a_sink_that_fails_to_close_is_reported(make_queue, caplog):
    class Clinging(Keeping):
        def close(self) -> None:
            raise OSError("cannot let go")

    for strict in (False, True):
        queue = make_queue(Clinging(), strict=strict)
        queue.put(metric(1))
        if strict:
            with pytest.raises(OSError, match="cannot let go"):
                queue.close()
        else:
            queue.close()
            assert "cannot let go" in caplog.text


def test_a_log_handler_that_puts_does_not_lock_up_with_a_failing_sink(make_queue, quick):
    queue = make_queue(Keeping(OSError("down")))

    class Putting(logging.Handler):
        def emit(self, record) -> None:
            time.sleep(0.001)  # holds its own lock while the worker reports under whatever lock it has
            queue.put(metric(0))

    handler, log = Putting(), logging.getLogger("fedvitals.telemetry")
    log.addHandler(handler)
    try:
        queue.put(metric(1))
        for _ in range(50):
            log.warning("from the training thread")
        assert queue.flush(PATIENCE) is False
    finally:
        log.removeHandler(handler)


def test_no_thread_to_be_had_means_waiting_and_not_raising(make_queue, monkeypatch):
    def refuse(_self) -> None:
        raise RuntimeError("can't start new thread")

    sink = Keeping()
    queue = make_queue(sink)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        queue.put(metric(1))
        assert queue.flush() is False
    queue.put(metric(2))
    assert queue.flush() is True
    assert len(sink.records) == 2


def test_a_signal_handler_may_put_in_the_midst_of_a_put(make_queue):
    sink = Keeping()
    queue = make_queue(sink, bulk=10**9)  # never so full that something is left out
    hits = []

    def on_alarm(*_) -> None:
        hits.append(1)
        queue.put(metric(-1))

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(hits) < 50:
            queue.put(metric(1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert queue.flush()
    assert sum(record.value < 0 for record in sink.records) == len(hits)


def test_a_full_queue_keeps_its_room_whatever_a_signal_handler_puts(make_queue, monkeypatch):
    """Wherever in a put the handler logs: as many records wait afterwards as may, no more and no less."""
    monkeypatch.setattr(queue_module, "POLL_SECONDS", PATIENCE)  # nothing is taken before the end
    for moment in range(28):
        queue = make_queue(Keeping(), bulk=10)
        calls = iter(range(1000))

        def log(frame, event, _, queue=queue, calls=calls, moment=moment) -> None:
            of_queue = frame.f_code.co_filename == queue_module.__file__ and event in ("call", "return")
            if of_queue and next(calls) == moment:
                sys.setprofile(None)
                queue.put(metric(-1))

        queue.put_many(metric(1) for _ in range(9))
        sys.setprofile(log)
        try:
            queue.put_many([metric(2)] * 3)
        finally:
            sys.setprofile(None)
        queue.put_many([metric(3)] * 15)
        assert queue.pending == 10, moment
        assert next(calls) > moment
        assert queue.lost == {"queue full": 18}
