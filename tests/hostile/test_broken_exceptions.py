# SPDX-License-Identifier: Apache-2.0
"""Exceptions whose text cannot be read: the user's own one arrives, and is recorded by its name."""

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.testing import MemorySink


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def in_a_round(monitor):
    with monitor.round(0, nn.Linear(2, 2)):
        raise UnreadableError


def in_a_client(monitor):
    with monitor.round(0, nn.Linear(2, 2)), monitor.client("a", nn.Linear(2, 2)):
        raise UnreadableError


def in_a_timed_block(monitor):
    with monitor.round(0), fv.timed("load"):
        raise UnreadableError


@pytest.mark.parametrize("train", [in_a_round, in_a_client, in_a_timed_block])
def test_the_users_exception_arrives(train):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, pytest.raises(UnreadableError):
        train(monitor)
    failed = [event for event in sink.events() if event.level == "error"]
    assert failed
    assert all("UnreadableError" in event.message for event in failed)
    assert not sink.events("monitor.error")


class BrokenSink:
    def write(self, records):
        raise UnreadableError


def test_a_sink_that_fails_so_stops_nothing(caplog):
    with fv.Monitor(None, sinks=[BrokenSink()]) as monitor, monitor.round(0):
        monitor.log(loss=1.0)
    assert "UnreadableError whose text fails" in caplog.text


def test_data_that_fail_so_stop_nothing(caplog):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise UnreadableError

    sink, model = MemorySink(), nn.Linear(2, 2)
    with fv.Monitor(None, sinks=[sink]) as monitor, monitor.round(0, model), monitor.client("a", model, data=Data()):
        pass
    assert sink.metrics("time.client")
    assert "UnreadableError" in caplog.text
