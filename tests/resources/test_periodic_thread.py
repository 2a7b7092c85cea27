# SPDX-License-Identifier: Apache-2.0
"""A thread that works until it is stopped."""

import threading

from fedvitals.resources.periodic_thread import PeriodicThread


def test_works_from_start_to_stop():
    worked, over = threading.Semaphore(0), threading.Event()

    def work(ticks):
        for _ in ticks:
            worked.release()
        over.set()

    thread = PeriodicThread("periodic", 0.001, work)
    thread.start()
    thread.start()
    assert [each.name for each in threading.enumerate()].count("periodic") == 1
    assert worked.acquire(timeout=10)
    assert worked.acquire(timeout=10)
    thread.stop()
    thread.stop()
    assert over.is_set()
    thread.start()
    assert "periodic" not in {each.name for each in threading.enumerate()}


def test_may_be_stopped_by_its_own_work():
    stopped = threading.Event()

    def work(ticks):
        for _ in ticks:
            thread.stop()
        stopped.set()

    thread = PeriodicThread("periodic", 0.001, work)
    thread.start()
    assert stopped.wait(10)
