# SPDX-License-Identifier: Apache-2.0
"""The queue: training never waits for a sink, order is kept, and what is lost is counted."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals.errors import FedvitalsError, RecordError
from fedvitals.records import Action, Event, Finding, Layer, LayerTable, Metric, Run, Snapshot, Suspect, Where
from fedvitals.telemetry import queue as queue_module
from fedvitals.telemetry.queue import BATCH, Queue
from fedvitals.telemetry.spill import Spill, drain_spill, from_json, to_json


def metric(value: float, node: str = "c1") -> Metric:
    return Metric(Where("run", 1, node), 0.0, "loss", float(value))


def error(number: int, node: str = "c1") -> Event:
    return Event(Where("run", 1, node), float(number), "error", "log", f"error {number}")


class Keeping:
    """A sink that keeps what it gets, fails with `trouble` while that is set, and refuses what is `poisonous`."""

    name = "keeping"

    def __init__(self, trouble: Exception | None = None, poisonous=lambda _: False) -> None:
        self.records: list = []
        self.batches: list[int] = []
        self.attempts = 0
        self.trouble = trouble
        self.poisonous = poisonous
        self.closed_by: list[str] = []

    def write(self, records, /) -> None:
        self.attempts += 1
        if self.trouble is not None:
            raise self.trouble
        if any(self.poisonous(record) for record in records):
            raise RecordError("poison")
        self.batches.append(len(records))
        self.records.extend(records)

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


class Hanging(Keeping):
    """A sink that does not come back before the test lets it."""

    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, records, /) -> None:
        self.entered.set()
        self.go.wait(10)
        super().write(records)


@pytest.fixture
def make_queue():
    queues = []

    def make(sink, **settings) -> Queue:
        queues.append(Queue(sink, **settings))
        return queues[-1]

    yield make
    for queue in queues:
        queue.strict = False
        queue.close(timeout=0.5)
        if isinstance(queue._sink, Hanging):
            queue._sink.go.set()
        if queue._thread is not None:
            queue._thread.join(5)
            assert not queue._thread.is_alive()


@pytest.fixture
def quick(monkeypatch):
    """Back-off of milliseconds instead of seconds."""
    monkeypatch.setattr(queue_module, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(queue_module, "LONGEST_DELAY", 0.01)


def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert len(sink.records) == sum(map(len, plans))


# --- full queues -----------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_the_oldest_bulk_records_and_counts_them(make_queue):
    sink = Hanging()
    queue = make_queue(sink, bulk=100)
    queue.put(metric(-1))
    assert sink.entered.wait(5)
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
    assert sink.entered.wait(5)
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
        assert sink.entered.wait(5)
        queue.put_many(error(i) for i in range(1, 9))
        assert queue.lost == {cause: 3}
        sink.go.set()
        assert queue.flush() is False
        assert [record.at for record in sink.records] == [0, 1, 2, 3, 4, 5]


# --- sinks that fail -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("timeout", [None, 0.05, 30.0])
def test_flush_gives_up_on_a_sink_that_keeps_failing(make_queue, quick, timeout):
    queue = make_queue(Keeping(OSError("down")))
    queue.put(metric(1))
    began = time.monotonic()
    assert queue.flush(timeout) is False
    assert time.monotonic() - began < 3
    assert queue.pending == 1  # still waiting for better times


def test_flush_gives_up_on_a_hanging_sink_and_other_queues_go_on(make_queue):
    hanging, working = Hanging(), Keeping()
    stuck, free = make_queue(hanging), make_queue(working)
    for queue in (stuck, free):
        queue.put(metric(1))
    assert stuck.flush(0.05) is False
    assert free.flush(5) is True
    began = time.monotonic()
    stuck.close(timeout=0.1)
    assert time.monotonic() - began < 2
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


def test_at_close_important_records_are_left_for_the_next_process(make_queue, quick, tmp_path):
    queue = make_queue(Keeping(OSError("down")), spill=tmp_path)
    queue.put_many([error(1), metric(1), metric(2), error(2)])
    wait_until(lambda: queue._failures)
    queue.put_many([error(3), metric(3)])
    queue.close(timeout=5)
    assert not queue._thread.is_alive()
    assert queue.lost == {"sink failed": 3}
    assert list(drain_spill(tmp_path, sink="another")) == []
    assert list(drain_spill(tmp_path, sink="keeping")) == [error(1), error(2), error(3)]
    assert list(tmp_path.iterdir()) == []


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
        assert queue.flush(5) is False
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
    queue = make_queue(sink)
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


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_inherits_nor_writes(make_queue, tmp_path):
    sink = Hanging()
    queue = make_queue(sink, spill=tmp_path, important=1)
    queue.put_many([error(0)])
    assert sink.entered.wait(5)
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


# --- the spill file --------------------------------------------------------------------------------------------------

WHERE = Where("run", 3, "c7", 5, "conv.weight", "edge-2")
IMPORTANT = [
    Run(
        "run",
        "digits",
        config={"rate": 0.1, "nested": {"a": [1, None, True]}},
        seed=7,
        tables=(LayerTable("parameter", (Layer("conv.weight", (8, 1, 3, 3), "float32"),)), LayerTable("buffer", ())),
    ),
    Event(WHERE, 1.5, "error", "log", "line\nbreak «ü» \u2028", {"file": "train.py:3"}, "pid-1", 9),
    Finding(WHERE, 2.0, "nan", "critical", 0.9, "NaN", {"z": 4.2}, (Suspect("c7", 0.8, "why"), Suspect("c8", 0.1))),
    Action(WHERE, 2.0, "nan", "exclude", None, {"rounds": 2}, "applied", "pid-1", 10),
    Snapshot(WHERE, 3.0, "global", "abc", 2**40),
]


@pytest.mark.parametrize("record", IMPORTANT, ids=lambda record: type(record).__name__)
def test_important_records_survive_json(record):
    line = to_json(record)
    assert "\n" not in line
    assert from_json(line) == record


def test_numbers_of_numpy_and_strange_objects_become_plain():
    event = Event(
        WHERE, np.float64(1.0), "error", "log", "x", {"a": np.float32(0.5), "b": np.arange(2), "c": WHERE.run}
    )
    assert from_json(to_json(event)).data == {"a": 0.5, "b": [0, 1], "c": "run"}
    assert np.isnan(from_json(to_json(Event(WHERE, 1.0, "error", "log", "x", {"a": float("nan")}))).data["a"])
    assert from_json(to_json(Event(WHERE, 1.0, "error", "log", "x", {"a": ValueError("v")}))).data == {"a": "v"}


def test_bulk_records_and_broken_lines_are_refused():
    with pytest.raises(RecordError, match="got Metric"):
        to_json(metric(1))
    for line in ("", "{", "[]", '{"kind": "Metric"}', '{"kind": "Run", "record": {"odd": 1}}'):
        with pytest.raises(RecordError, match="cannot be read"):
            from_json(line)


def test_a_torn_last_line_costs_only_itself(tmp_path, caplog):
    text = "\n".join(to_json(record) for record in IMPORTANT)
    (tmp_path / "spill-store-1-ab.jsonl").write_text(text[:-10])
    assert list(drain_spill(tmp_path)) == IMPORTANT[:-1]
    assert "Left out of the spill file" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_drain_that_stops_early_leaves_the_file(tmp_path):
    spill = Spill(tmp_path, "store")
    for record in IMPORTANT:
        spill.append(record)
    spill.close(keep=True)
    draining = drain_spill(tmp_path)
    assert next(draining) == IMPORTANT[0]
    draining.close()
    assert list(drain_spill(tmp_path)) == IMPORTANT
    assert list(drain_spill(tmp_path / "nowhere")) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk to be had")  # noqa: PTH110
def test_a_full_disk_fails_cleanly():
    spill = Spill(queue_module.Path("/dev"), "store")
    with open("/dev/full", "ab", buffering=0) as spill._writer:  # noqa: PTH123
        with pytest.raises(OSError, match="No space left"):
            spill.append(IMPORTANT[0])
        assert spill._end == 0
