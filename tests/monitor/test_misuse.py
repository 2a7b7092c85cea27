# SPDX-License-Identifier: Apache-2.0
"""What a monitor says when it is used in a way that records nothing: once, in words, and without harm."""

import contextlib
import logging

import pytest
import torch

from support.models import make, make_data, train, watched


def client_round(monitor, name="c0", steps=1):
    model = make("mlp")
    with monitor.client(name, model):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), steps)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "fedvitals" and r.levelno >= logging.WARNING]


def test_who_goes_on_with_a_closed_monitor_is_told_once_and_nothing_counts_as_lost(caplog):
    monitor, sink = watched()
    with monitor, monitor.round(0):
        client_round(monitor)
    stored = len(sink.records)
    for number in (1, 2):
        with monitor.round(number, make("mlp")):
            client_round(monitor)
            monitor.updates(number, {"c0": [torch.ones(2)]})
            monitor.log(accuracy=1.0)
    monitor.close()
    (text,) = warnings_of(caplog)
    assert f"Run {monitor.run.id} was closed" in text
    assert "new fv.Monitor" in text
    assert (len(sink.records), monitor.lost) == (stored, 0)


def test_a_client_outside_of_any_round_is_told_once(caplog):
    monitor, sink = watched()
    with monitor:
        client_round(monitor)
        client_round(monitor, "c1")
        with monitor.round(0):
            client_round(monitor, "c2")
    (text,) = warnings_of(caplog)
    assert "'c0' was opened outside of a round" in text
    (event,) = sink.events("client.outside_round")
    assert (event.level, event.where.node, event.message) == ("warning", "c0", text)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_an_interruption_is_told_once_and_is_no_crash(kind):
    monitor, sink = watched()
    with contextlib.suppress(kind), monitor, monitor.round(0), monitor.edge("edge-0"), monitor.client("c1"):
        raise kind
    (event,) = [e for e in sink.events() if e.level != "info"]
    assert (event.name, event.where.node, event.data["exception"]) == ("interrupted", "c1", kind.__name__)
    assert [str(finding) for finding in monitor.findings()] == []


def test_a_second_interruption_is_told_as_well():
    monitor, sink = watched()
    with monitor:
        for number in range(2):
            with contextlib.suppress(KeyboardInterrupt), monitor.round(number):
                raise KeyboardInterrupt
    assert [e.where.round for e in sink.events("interrupted")] == [0, 1]


def test_a_model_of_arrays_is_answered_with_what_to_do_instead():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0), monitor.client("c0", {"w": [1.0]}):
        pass
    (event,) = sink.events("monitor.error")
    assert "monitor.updates(round, {name: update})" in event.message
    assert sink.metrics("time.client", node="c0")


def test_what_is_no_number_is_named_and_the_other_metrics_of_the_call_are_kept():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        monitor.log(accuracy=None, loss=0.5, f1=[1.0])
    (event,) = sink.events("monitor.error")
    assert "These are not numbers: accuracy=None, f1=[1.0]." in event.message
    assert sink.value("loss") == 0.5


def test_updates_that_are_of_no_client_are_answered_with_the_form_that_is_taken():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        monitor.updates(0, None)
    (event,) = sink.events("monitor.error")
    assert "updates by client, such as {'c1': update, 'c2': update}; got NoneType" in event.message
