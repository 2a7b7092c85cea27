# SPDX-License-Identifier: Apache-2.0
"""Machines, links and clocks: each fault is named on its client, and what happens to healthy clients is not."""

import numpy as np
import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.system import DETECTORS
from fedvitals.diagnosis.evidence.attendance import chance_of_failures
from fedvitals.records import Event, Metric, Where
from fedvitals.store import MemoryStore
from support.lab.examined import CULPRIT, NETWORK, ONSET, findings_by, first_rounds, watched

ILL = {"nodes": CULPRIT, "since": ONSET}


@pytest.mark.parametrize(
    ("fault", "issue"),
    [
        (lab.crash(**ILL), "CRASH"),
        (lab.memory_hog(fatal=True, **ILL), "OUT_OF_MEMORY"),
        (lab.disk_full(**ILL), "DISK_FULL"),
        (lab.telemetry_lost(**ILL), "TELEMETRY_LOST"),
    ],
)
@pytest.mark.parametrize("model", ["mlp", "logistic"])
def test_what_is_reported_is_said_at_once(fault, issue, model):
    settings = {"model": "logistic"} if model == "logistic" else {}
    findings = findings_by(watched(fault, rounds=5, **settings), DETECTORS)
    assert first_rounds(findings) == {(issue, "c3"): ONSET}
    assert {f.evidence["since"] for f in findings} == {ONSET}


def test_a_crash_names_its_class_and_quotes_no_word_of_the_client():
    history = watched(lab.crash(**ILL), rounds=5)
    crash = next(iter(findings_by(history, DETECTORS)))
    assert crash.evidence["exception"] == "RuntimeError"
    assert "RuntimeError" in crash.message
    assert "on purpose" not in repr(crash)
    assert any("on purpose" in event.message for event in history.events("client.failed"))  # there it stands


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "issue", "network"),
    [
        (lab.drop_out(**ILL), "DROP_OUT", NETWORK),
        (lab.lost_message(**ILL), "COMMUNICATION_FAILURE", NETWORK),
        (lab.corrupted_message(**ILL), "COMMUNICATION_FAILURE", NETWORK),
        (lab.timeout(**ILL), "TIMEOUT", lab.Network(jitter=0.1, deadline_seconds=600.0)),
        (lab.straggler(factor=6.0, **ILL), "STRAGGLER", NETWORK),
    ],
)
def test_what_happens_too_often_is_said_within_three_calls(fault, issue, network):
    found = first_rounds(findings_by(watched(fault, network=network), DETECTORS))
    assert set(found) == {(issue, "c3")}
    assert ONSET < found[issue, "c3"] <= ONSET + 2


def test_a_connection_that_hangs_where_there_is_no_deadline():
    found = first_rounds(findings_by(watched(lab.timeout(**ILL), network=NETWORK, rounds=5), DETECTORS))
    assert found["TIMEOUT", "c3"] == ONSET


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [90.0, -90.0])
@pytest.mark.parametrize("topology", ["centralized", {"kind": "asynchronous", "buffer": 6}])
def test_a_clock_that_cannot_be_right(seconds, topology):
    fault = lab.clock_skew(seconds=seconds, **ILL)
    findings = findings_by(watched(fault, network=NETWORK, rounds=6, topology=topology), DETECTORS)
    assert {(f.issue, f.where.node) for f in findings} == {("CLOCK_SKEW", "c3")}
    number = findings[0].evidence["numbers"][0]
    assert abs(number["value"] - seconds) < 1.0
    assert ("ahead" in findings[0].message) == (seconds > 0)


def invented(*records):
    store = MemoryStore()
    store.write([type(r)(*(getattr(r, f) for f in r.__slots__[:-2]), "s", i) for i, r in enumerate(records)])
    return store.history("r")


def test_who_was_always_there_and_is_not_any_more_has_dropped_out_without_a_word():
    told = [
        Metric(Where("r", number, f"c{i}"), 1.0, "update.norm", 1.0)
        for number in range(9)
        for i in range(6)
        if i != 4 or number < 5
    ]
    assert first_rounds(findings_by(invented(*told), DETECTORS)) == {("DROP_OUT", "c4"): 7}


def test_a_full_disk_of_the_server_and_a_killed_worker():
    told = [
        Event(Where("r", 0), 1.0, "warning", "monitor.error", "Sink 'store': OSError: [Errno 28] No space left"),
        Event(Where("r", 0, "c2"), 1.0, "error", "client.failed", "The worker process died (out of memory)."),
    ]
    found = first_rounds(findings_by(invented(*told), DETECTORS))
    assert found == {("DISK_FULL", None): 0, ("OUT_OF_MEMORY", "c2"): 0}


def test_records_lost_here_are_told_of_the_whole():
    told = [Metric(Where("r", number), 1.0, "monitor.lost", value) for number, value in enumerate((0.0, 0.0, 7.0, 7.0))]
    assert first_rounds(findings_by(invented(*told), DETECTORS)) == {("TELEMETRY_LOST", None): 2}


def test_many_slow_devices_are_a_kind_of_device():
    told = [
        Metric(Where("r", number, f"c{i}"), 1.0, "time.compute_virtual", 8.0 + i / 10 if i < 4 else 1.0 + i / 100)
        for number in range(6)
        for i in range(10)
    ]
    assert findings_by(invented(*told), DETECTORS) == []


@pytest.mark.parametrize("slow", [None, "c4"])
def test_on_a_busy_machine_only_who_stays_slow_is_a_straggler(slow):
    """In a fifth of its rounds each client waits for a processor, at times three rounds in a row."""
    stream = np.random.default_rng(3)
    told = [
        Metric(Where("r", number, f"c{i}"), 1.0, "time.client", 0.4 * wait * (8 if f"c{i}" == slow else 1))
        for number in range(20)
        for i, wait in enumerate(np.where(stream.random(10) < 0.2, 9.0, 1.0) * np.exp(0.1 * stream.random(10)))
    ]
    assert {node for _, node in first_rounds(findings_by(invented(*told), DETECTORS))} == ({slow} - {None})


def test_a_chance_is_the_tail_of_a_binomial():
    assert chance_of_failures(0, 5, 0.1) == 1.0
    assert chance_of_failures(5, 5, 0.1) == pytest.approx(1e-5)
    assert chance_of_failures(1, 2, 0.5) == pytest.approx(0.75)
