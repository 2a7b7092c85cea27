# SPDX-License-Identifier: Apache-2.0
"""Exceptions of clients in Ray's processes: their class is known, and their words as far as the level allows."""

import logging

import pytest
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.hosts.flower.failures import client_failure_of
from fedvitals.records import Finding
from support.flower.federation import client_app, federate, is_round, node_of, sealed, training, watched, with_mod
from support.flower.ray_texts import error_reply_of, log_error_of

SECRET = "patient 4711"
ILL = "101"


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (f"ValueError: {SECRET}", "ValueError", f"ValueError: {SECRET}"),
        (f"ValueError: {SECRET}\nand more", "ValueError", f"ValueError: {SECRET}\nand more"),
        ("MemoryError", "MemoryError", "MemoryError"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError", "OutOfMemoryError: CUDA out of memory."),
        ("pkg.train.<locals>.Broken: no", "Broken", "Broken: no"),
    ],
)
def test_the_class_and_the_words_are_those_of_the_clients_exception(raised, kind, words):
    failure = client_failure_of(Error(2, error_reply_of(raised)), "train")
    assert (failure.event, failure.data["exception"], failure.message) == ("client.failed", kind, words)


def test_of_chained_exceptions_the_last_one_counts():
    chained = f"KeyError: {SECRET}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    raised = f'{chained}ray::ClientAppActor.run()\n  File "x.py", line 2, in train\nLookupError: none'
    assert client_failure_of(Error(2, error_reply_of(raised)), "train").data["exception"] == "LookupError"


@pytest.mark.parametrize("text", ["<class 'ray.exceptions.RayTaskError(X)'>:<'no more'>", "nothing like it", ""])
def test_a_text_that_is_not_understood_is_a_failure_all_the_same(text):
    assert client_failure_of(Error(2, text), "train").event == "client.failed"


def on_ray(raised):
    """A federation in which Ray tells of what one client raised, and Flower's log quotes it, as in its simulation."""

    def fate(request, reply):
        if node_of(request) != ILL or not is_round(request, 2):
            return reply
        log_error_of(raised)
        return sealed(Message(Error(2, error_reply_of(raised)), reply_to=request))

    return fate


@pytest.mark.parametrize("level", [2, 3])
def test_the_log_keeps_no_words_that_are_not_kept_of_the_failure(level):
    with watched(privacy=level) as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, fate=on_ray(f"ValueError: {SECRET}"))
    kept = {event.name for event in sink.events() if SECRET in event.message or SECRET in str(event.data)}
    assert kept == (set() if level == 2 else {"log", "client.failed"})
    (failure,) = sink.events("client.failed")
    assert failure.data["exception"] == "ValueError"
    assert len(sink.events("log", round=2)) == 3  # that there was something is kept


def test_a_quoted_error_reply_loses_its_words_at_level_2():
    class Quoting(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                if reply.has_error():
                    logging.getLogger("mine").warning("A client failed: %s", reply.error.reason)
                    raise RuntimeError(f"Cannot go on: {reply.error.reason}")
            return super().aggregate_train(server_round, replies)

    def train(message, context):
        if str(context.node_id) == ILL:
            raise ValueError(SECRET)
        return training(message, context)

    with watched() as (monitor, sink), pytest.raises(RuntimeError, match=SECRET):
        federate(Quoting(), client_app(fv.flower.client_mod(), train=train), monitor, rounds=1)
    assert not [event for event in sink.events() if SECRET in event.message or SECRET in str(event.data)]
    (log,) = sink.events("log")
    assert log.message == "A client failed: <class 'ValueError'>"
    (failed,) = sink.events("round.failed")
    assert failed.message == "RuntimeError: Cannot go on: <class 'ValueError'>"


@pytest.mark.parametrize("raised", ["MemoryError: Unable to allocate 9 GiB", "torch.OutOfMemoryError: CUDA"])
def test_out_of_memory_is_found_as_such(raised):
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=3, fate=on_ray(raised))
    assert {(finding.issue, finding.where.node) for finding in sink.of(Finding)} == {("OUT_OF_MEMORY", ILL)}


@pytest.mark.parametrize("words", [SECRET, f"{SECRET}\nin two lines"])
def test_with_tracebacks_on_both_sides_the_whole_traceback_is_kept(words):
    def train(message, context):
        if str(context.node_id) == ILL:
            raise ValueError(words)
        return training(message, context)

    app = client_app(fv.flower.client_mod(tracebacks=True), train=train)
    for server, kept in (({"tracebacks": True}, True), ({}, False), ({"privacy": 3}, False)):
        with watched(**server) as (monitor, sink):
            federate(FedAvg(), app, monitor, rounds=1)
        (failure,) = sink.events("client.failed")
        assert ("raise ValueError(words)" in failure.data.get("traceback", "")) == kept
        assert (failure.message == f"ValueError: {words}") == bool(server)
