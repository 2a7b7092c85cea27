# SPDX-License-Identifier: Apache-2.0
"""Messages that a host tells of together: one that cannot be recorded costs nobody else's."""

import contextlib
import sqlite3

import pytest

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.records import Transfer
from fedvitals.testing import MemorySink

GOOD = [("server", "c0", 10, 20, 0.5, "model"), ("c1", "server", 7.9, None, None, "update")]
BAD = [
    ("", "server", 5, 5, 0.1, "update"),
    ("c2", "server", "much", 5, 0.1, "update"),
    ("c2", "server", 5, 2**70, 0.1, "update"),
]


def transfers(sink):
    return [(t.sender, t.receiver, t.bytes, t.raw_bytes, t.seconds, t.kind) for t in sink.of(Transfer)]


def test_several_messages_are_recorded_as_each_of_them_would_be():
    together, apart = MemorySink(), MemorySink()
    with fv.Monitor(None, sinks=[together], strict=True) as monitor, monitor.round(0):
        monitor.host.transfer_each(GOOD)
    with fv.Monitor(None, sinks=[apart], strict=True) as monitor, monitor.round(0):
        for message in GOOD:
            monitor.transfer(*message)
    assert transfers(together) == transfers(apart) == [GOOD[0], ("c1", "server", 7, 7, None, "update")]
    sent = [{m.where.node: m.value for m in sink.metrics("traffic.sent")} for sink in (together, apart)]
    assert sent[0] == sent[1] == {"server": 10, "c1": 7}


@pytest.mark.parametrize("together", [True, False])
def test_a_message_that_cannot_be_recorded_costs_nothing_else(tmp_path, together):
    with fv.Monitor(tmp_path / "runs.db") as monitor:
        with monitor.round(0):
            if together:
                monitor.host.transfer_each([GOOD[0], *BAD, GOOD[1]])
            else:
                for message in (GOOD[0], *BAD, GOOD[1]):
                    monitor.transfer(*message)
        assert monitor.flush()
        assert monitor.lost == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as store:
        assert store.execute("SELECT count(*) FROM transfer").fetchone() == (2,)


@pytest.mark.parametrize("message", BAD)
def test_such_a_message_is_refused_where_errors_are_raised(message):
    with fv.Monitor(None, strict=True) as monitor, monitor.round(0), pytest.raises((ConfigError, ValueError)):
        monitor.host.transfer_each([GOOD[0], message])
