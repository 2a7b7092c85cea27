# SPDX-License-Identifier: Apache-2.0
"""Clients that fail, stay away, answer late or never: each is named, the round goes on, the model stays the same."""

import pytest
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.records import Event, Span
from fedvitals.time_parts import ROUND
from support.flower.federation import (
    OLDEST,
    HandGrid,
    Late,
    client_app,
    evaluation,
    federate,
    flower_run,
    is_round,
    model,
    node_of,
    numbers,
    requests_for,
    training,
    watched,
    with_mod,
)

SUPERLINK = 1  # the node id under which it answers itself
SECRET = "patient 4711"


def when(number, node, what, phase="train"):
    """A fate for one node in one round."""
    return lambda request, reply: what(request, reply) if _is(request, number, node, phase) else reply


def _is(request, number, node, phase):
    return node_of(request) == node and is_round(request, number, phase)


def lost(request, reply):
    return None


def late(request, reply):
    return Late(reply)


def from_superlink(code, reason="not there"):
    def fate(request, reply):
        found = Message(Error(code, reason), reply_to=request)
        found.metadata.__dict__["_src_node_id"] = SUPERLINK
        return found

    return fate


def cohorts(sink, phase="train"):
    return {e.where.round: e.data for e in sink.events("cohort") if e.data["phase"] == phase}


def both(fate=None, app=client_app, **settings):
    """Run it twice, with and without us; the sink, and whether the models are equal to the last bit."""
    alone, _ = federate(FedAvg(), app(), rounds=3, fate=fate)
    with watched(**settings) as (monitor, sink):
        seen, _ = federate(FedAvg(), app(fv.flower.client_mod()), monitor, rounds=3, fate=fate)
    assert numbers(seen.arrays) == numbers(alone.arrays)
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 3]
    return sink


def failing(*mods, phase="train"):
    def handler(inner):
        def handle(message, context):
            if context.node_id == 102 and is_round(message, 2, phase):
                raise LookupError(SECRET)
            return inner(message, context)

        return handle

    return client_app(*mods, train=handler(training), evaluate=handler(evaluation))


# -- error replies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_who_raises_is_named_with_the_class_of_the_exception_and_nothing_more(phase):
    sink = both(app=lambda *mods: failing(*mods, phase=phase))
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.where.round) == ("102", 2)
    assert event.data == {"exception": "LookupError", "code": 2, "phase": phase, "round": 2}
    data = cohorts(sink, phase)
    assert (data[2]["failed"], sorted(data[2]["answered"])) == (["102"], ["100", "101", "103"])
    assert [data[n]["failed"] for n in (1, 3)] == [[], []]
    assert SECRET not in "".join(str(e) for e in sink.records if not _of_flowers_log(e))


def _of_flowers_log(record):
    return isinstance(record, Event) and record.name == "log"


def test_a_client_that_failed_leaves_nothing_behind_for_the_next_reply():
    """All nodes of one process share what waits to be sent."""
    sink = both(app=failing)
    assert [span.where.node for span in sink.of(Span, "client", round=2)].count("102") == 0
    assert not sink.events("telemetry.refused")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "event", "exception"),
    [
        (5, "client.dropped_out", "NODE_UNAVAILABLE"),
        (8, "client.failed", "WorkerDied"),
        (4, "client.failed", "REPLY_MESSAGE_UNAVAILABLE"),
        (77, "client.failed", "ERROR_77"),
    ],
)
def test_what_the_superlink_answers_itself_is_told_of_the_node_that_was_asked(code, event, exception):
    sink = both(fate=when(2, "103", from_superlink(code)))
    (found,) = sink.events(event)
    assert (found.where.node, found.where.round, found.data["code"]) == ("103", 2, code)
    known = {5: ("NODE_UNAVAILABLE", "ERROR_5")}  # the oldest version has no name for it
    assert found.data["exception"] in known.get(code, (exception,))
    assert cohorts(sink)[2]["failed"] == ["103"]
    assert not sink.of(Event, event, node=str(SUPERLINK))


@pytest.mark.skipif(OLDEST, reason="Flower 1.21 itself raises where nobody answers")
def test_a_round_in_which_all_fail_goes_on():
    everyone = [when(2, str(node), from_superlink(5)) for node in range(100, 104)]

    def fate(request, reply):
        for one in everyone:
            reply = one(request, reply)
        return reply

    sink = both(fate=fate)
    assert sorted(e.where.node for e in sink.events("client.dropped_out", round=2)) == ["100", "101", "102", "103"]
    assert len(cohorts(sink)[3]["answered"]) == 4


def test_what_the_servers_own_code_raises_is_told_and_passed_on():
    strategy = FedAvg()
    strategy.aggregate_train = lambda *_: 1 / 0
    with watched() as (monitor, sink):
        with pytest.raises(ZeroDivisionError):
            federate(strategy, with_mod(), monitor)
        (event,) = sink.events("round.failed") or [monitor.flush(), *sink.events("round.failed")][1:]
    assert (event.where.round, event.data["exception"]) == (1, "ZeroDivisionError")
    assert sink.of(Span, ROUND, round=1)  # what was known of the round is told


# -- no reply, and late ones ------------------------------------------------------------------------------------------


def test_who_does_not_answer_in_time_is_named():
    sink = both(fate=when(2, "101", lost))
    (event,) = sink.events("update.late")
    assert (event.where.node, event.where.round, event.data["phase"]) == ("101", 2, "train")
    assert event.data["busy"] is False
    assert cohorts(sink)[2]["late"] == ["101"]
    assert "101" not in cohorts(sink)[2]["answered"]


def test_who_is_asked_again_while_it_still_owes_is_told_as_busy():
    sink = both(fate=when(1, "101", lost))
    busy = sink.events("client.busy")
    assert {(e.where.node, e.where.round) for e in busy} == {("101", 1)}  # asked to evaluate; it does, and owes no more
    assert cohorts(sink, "evaluate")[1]["busy"] == ["101"]
    assert not cohorts(sink)[2]["busy"]


def test_who_never_answers_stays_busy():
    sink = both(fate=lambda request, reply: None if node_of(request) == "101" else reply)
    assert [cohorts(sink)[n]["late"] for n in (1, 2, 3)] == [["101"]] * 3
    assert [cohorts(sink)[n]["busy"] for n in (1, 2, 3)] == [[], ["101"], ["101"]]
    assert [e.data["busy"] for e in sink.events("update.late")] == [False, True, True, True, True, True]


def test_an_answer_that_comes_too_late_says_so_and_changes_nothing():
    sink = both(fate=when(2, "100", late))
    (event,) = sink.events("client.answered_late")
    assert (event.where.node, event.data["round"], event.data["phase"]) == ("100", 2, "train")
    assert event.data["waited"] >= 0
    assert [e.where.node for e in sink.events("update.late")] == ["100"]
    assert not cohorts(sink)[3]["busy"]  # it owes nothing any more


def test_a_late_answer_that_is_an_error_says_why_it_was_late():
    raised = Error(2, f"<class 'TimeoutError'>:<'{SECRET}'>")
    sink = both(fate=when(2, "100", lambda request, _: Late(Message(raised, reply_to=request))))
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.data["exception"], event.data["round"]) == ("100", "TimeoutError", 2)


def test_in_a_loop_of_ones_own_nobody_is_late_before_the_round_is_over():
    """Only whoever pulls knows how long it waits."""
    with watched() as (monitor, sink), flower_run():
        grid = fv.flower.attach(HandGrid(with_mod(), fate=when_first("102")), monitor)
        for _ in range(2):
            grid.pull_messages(grid.push_messages(requests_for(grid, model())))
    (event,) = sink.events("update.late")
    assert (event.where.node, event.where.round) == ("102", 1)
    assert cohorts(sink)[2]["busy"] == ["102"]


def when_first(node):
    asked = []

    def fate(request, reply):
        asked.append(node_of(request))
        return None if asked.count(node) == 1 and node_of(request) == node else reply

    return fate
