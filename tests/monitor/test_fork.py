# SPDX-License-Identifier: Apache-2.0
"""A process that is forked while a run is open: the run is its parent's."""

import os
import warnings

import pytest

from support.models import watched
from support.waiting import wait_until
from support.worker_tasks import PROBES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_neither_waits_for_its_parents_locks_nor_says_that_records_are_lost(capfd):
    """As `close` at the exit of a forked process: a thread of the parent may hold any lock when it forks."""
    monitor, sink = watched(PROBES)
    with monitor:
        monitor.log(accuracy=0.5)
        with monitor.host.monitored._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                monitor.close()
                os._exit(0)
            wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    assert sink.value("accuracy") == 0.5
    assert "lost" not in capfd.readouterr().err
