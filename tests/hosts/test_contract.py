# SPDX-License-Identifier: Apache-2.0
"""Every host holds the contract of hosts, and the contract notices a host that does not."""

import logging
import os
import runpy
import time
from pathlib import Path

import pytest

import fedvitals as fv
from fedvitals.monitor.lifecycle import Lifecycle
from fedvitals.testing import check_host, scripted_federation
from fedvitals.transport.queue import Queue
from support.hosts.lab_runs import LabHost
from support.hosts.plain_loop import LoopHost, PayloadHost
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "pipe_federation.py"
EVERY = (
    "identity", "late and lost replies", "hostile telemetry", "restart", "fork", "close twice",
    "rounds without a barrier",
)  # fmt: skip


def check(driver):
    """Checks that all pass but those that the driver says it has no such thing for, with the reason shown."""
    outcome = check_host(driver)
    assert tuple(outcome) == EVERY
    for name, words in outcome.items():
        assert words == (f"left out: {driver.cannot[name]}" if name in driver.cannot else "passed")


def test_a_plain_loop():
    check(LoopHost())


def test_a_loop_whose_telemetry_comes_from_elsewhere():
    check(PayloadHost())


def test_the_lab():
    check(LabHost())


def test_flower():
    pytest.importorskip("flwr", reason="needs flwr: pip install 'fedvitals[flower]'")
    from support.hosts.flower_grid import FlowerHost

    check(FlowerHost())


@pytest.mark.nvflare
@pytest.mark.thorough
def test_nvflare():
    pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
    from support.hosts.nvflare_simulator import NVFlareHost

    check(NVFlareHost())


@pytest.mark.thorough
def test_the_worked_example_which_has_at_most_100_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 100
    check(runpy.run_path(str(EXAMPLE))["PipeHost"]())


# -- hosts that do not hold it ----------------------------------------------------------------------------------------


class BelievesClientsNames(LoopHost):
    def known_as(self, node, round_index):
        return f"process-{round_index}-of-{node}"


class CountsTwice(LoopHost):
    def train(self, script, monitor, round_index, node, shared):
        weights = super().train(script, monitor, round_index, node, shared)
        if (round_index, node) == (2, "c2"):  # whose answer to round 1 was late, and comes now
            monitor.updates(round_index, {"c1": {name: values.T for name, values in weights.items()}})
        return weights


class ForgetsWhoIsMissing(LoopHost):
    def report_missing(self, monitor, node, trouble):
        pass


class AccusesEverybody(LoopHost):
    def report_missing(self, monitor, node, trouble):
        for other in ("c0", node):
            super().report_missing(monitor, other, trouble)


class BelievesPayloads(PayloadHost):
    def absorb(self, monitor, node, payload):
        monitor.host.absorb(payload)


class NamesTheWrongSender(PayloadHost):
    def absorb(self, monitor, node, payload):
        monitor.host.absorb(payload, "c0")


class MixesRuns(LoopHost):
    def monitor(self, script, store):
        return fv.Monitor(store, id="always-the-same", machine=False)


class HidesAge(LoopHost):
    def mark_stale(self, monitor, round_index, node):
        pass


class WaitsForNobody(LoopHost):
    def federate(self, script, monitor):
        super().federate(script, monitor)
        (Path(script.folder) / "asynchronous.notes").unlink(missing_ok=True)  # as if no answer had been taken


class ClosesOnce(LoopHost):
    def close_of(self, monitor):
        def close():
            assert monitor.run.finished is None, "closed already"
            monitor.close()

        return close


class NeverCloses(LoopHost):
    def run(self, script, store):
        with self.monitor(script, store) as monitor:
            self.federate(script, monitor)


class HangsAfterFork(LoopHost):
    def close_of(self, monitor):
        server = os.getpid()
        return lambda: monitor.close() if os.getpid() == server else time.sleep(1000)


class WritesWhatAForkLogs(LoopHost):
    def train(self, script, *args):
        if script.forks_in is not None:
            logging.getLogger("federation").error(scripted_federation.FORKED_WORDS)
        return super().train(script, *args)


class NeverForks(LoopHost):
    def federate(self, script, monitor):
        object.__setattr__(script, "forks_in", None)
        super().federate(script, monitor)


BROKEN = {
    BelievesClientsNames: "identity: records tell of ['process-0-of-c0'",
    CountsTwice: "identity: round 2 has 1 updates of c1, which did not answer",
    ForgetsWhoIsMissing: "late and lost replies: c2 answered late in round 1; update.late is to say so",
    AccusesEverybody: "late and lost replies: ['update.late'] of c0 in round 1, and nothing was wrong with it",
    BelievesPayloads: "hostile telemetry: the store has 'user.forged' of c0, which c3 made up",
    NamesTheWrongSender: "hostile telemetry: telemetry of ['c0'",
    MixesRuns: "restart: 2 rounds were run again, and the store has []",
    HangsAfterFork: "fork: the forked process did not end",
    WritesWhatAForkLogs: "fork: what the forked process logged is in the store",
    NeverForks: "fork: the host did not call federation.in_round",
    ClosesOnce: "close twice: closing twice raised AssertionError: closed already",
    NeverCloses: "close twice: the host did not call federation.at_end",
    HidesAge: "rounds without a barrier: the update of c2, asked in round 0 and taken in round 3, stands there",
    WaitsForNobody: "rounds without a barrier: the answer of c2, asked in round 0, was never taken in a later round",
}


@pytest.mark.parametrize("host", BROKEN, ids=lambda host: host.__name__)
def test_a_host_that_does_not_hold_it_fails_the_check_that_is_about_it(host, monkeypatch):
    monkeypatch.setattr(scripted_federation, "FORK_SECONDS", 1.0)
    with pytest.raises(AssertionError) as failure:
        check_host(host())
    assert BROKEN[host] in str(failure.value)


def test_without_our_care_at_forks_the_check_fails(monkeypatch):
    monkeypatch.setattr(scripted_federation, "FORK_SECONDS", 1.0)
    monkeypatch.setattr(Queue, "_detach", lambda self: None)
    monkeypatch.setattr(Lifecycle, "is_of_parent", False)
    with pytest.raises(AssertionError, match="fork: "):
        check_host(LoopHost())


def test_a_check_that_does_not_exist_or_that_all_hosts_must_pass_cannot_be_left_out():
    for check_name in ("nothing of the sort", "identity"):
        driver = LoopHost()
        driver.cannot = {check_name: "why"}
        with pytest.raises(AssertionError, match="no check that a host can leave out"):
            check_host(driver)
