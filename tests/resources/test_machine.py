# SPDX-License-Identifier: Apache-2.0
"""The machine, sampled in the background: real numbers, and no trace before the first event or after the end."""

import mmap
import sys
import threading
import time

import pytest
import torch

import fedvitals as fv
from fedvitals.catalog import CATALOG
from fedvitals.resources import machine
from fedvitals.resources.machine import MachineSampler, Sample, why_not
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.waiting import wait_until

ALWAYS = {"machine.cpu", "machine.memory", "machine.memory_free", "process.cpu", "process.resident"}


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "fedvitals-machine"]


def test_a_sample_tells_what_is_so():
    pytest.importorskip("psutil")
    sample = Sample([])
    until = time.process_time() + 0.2
    while time.process_time() < until:  # one core at work
        pass
    found = sample()
    assert found.keys() >= ALWAYS
    assert found.keys() <= CATALOG.keys()
    assert holds_for_each(CATALOG[name].level == 0 for name in found)
    assert 0 < found["machine.cpu"] <= 100
    assert found["process.cpu"] > 0
    assert found["process.resident"] < found["machine.memory"] + found["machine.memory_free"]
    with mmap.mmap(-1, 64 << 20) as held:  # a tensor may be given what others have freed
        held.write(b"x" * (64 << 20))
        assert sample()["process.resident"] - found["process.resident"] > 32e6


def test_several_gpus_are_told_as_one():
    pytest.importorskip("psutil")
    devices = [
        lambda: {"gpu.utilisation": 90.0, "gpu.memory": 5.0},
        lambda: {"gpu.utilisation": 10.0, "gpu.memory": 2.0},
    ]
    found = Sample(devices)()
    assert (found["gpu.utilisation"], found["gpu.memory"]) == (50.0, 7.0)


def test_it_tells_until_it_is_stopped():
    pytest.importorskip("psutil")
    told = []
    sampler = MachineSampler(told.append, pytest.fail, period=0.01)
    sampler.start()
    sampler.start()
    wait_until(lambda: len(told) >= 3)
    sampler.stop()
    count = len(told)
    assert not samplers()
    sampler.start()  # what has ended does not begin again
    time.sleep(0.03)
    assert len(told) == count


def test_what_fails_is_told_once_and_ends_it():
    pytest.importorskip("psutil")
    failed = []

    def tell(_samples):
        raise OSError("no such counter")

    sampler = MachineSampler(tell, failed.append, period=0.01)
    sampler.start()
    wait_until(lambda: not samplers())
    assert [str(error) for error in failed] == ["no such counter"]
    sampler.stop()


def test_a_monitor_samples_from_its_first_event_to_its_end(monkeypatch):
    pytest.importorskip("psutil")
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], privacy=0, strict=True) as monitor:
        assert not samplers()
        monitor._run.lifecycle._machine._thread._period = 0.01
        with monitor.round(4):
            wait_until(lambda: monitor.flush() and any(getattr(r, "name", "") == "machine.cpu" for r in sink.records))
    assert not samplers()
    told = [r for r in sink.records if getattr(r, "name", "").startswith(("machine.", "process."))]
    assert {r.name for r in told} >= ALWAYS
    assert {(r.where.node, r.where.round, r.where.group) for r in told} == {("server", 4, None)}


def test_it_can_be_switched_off():
    with fv.Monitor(None, sinks=[MemorySink()], machine=False, strict=True) as monitor, monitor.round(0):
        assert not samplers()


def test_without_psutil_nothing_happens_and_it_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert "fedvitals[system]" in why_not()
    sampler = MachineSampler(pytest.fail, pytest.fail, period=0.01)
    sampler.start()
    assert not samplers()
    sampler.stop()


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    import contextlib

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with contextlib.ExitStack() as stack:
        assert machine.gpus(stack) == []
    assert not torch.cuda.is_initialized()
