# SPDX-License-Identifier: Apache-2.0
"""`timed`: spans that nest, exceptions that pass through, and a user's random streams left alone."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time

import numpy as np
import pytest

from fedvitals.errors import ConfigError
from fedvitals.records import Event, Span, Where
from fedvitals.scope import Scope, current
from fedvitals.transport.timing import new_span_id, new_trace, timed


@pytest.fixture
def emitted():
    kept = []
    scope = Scope("digits-1", kept.append, 3, "c7", "edge-2", "f" * 32, "0" * 16)
    token = current.set(scope)
    yield kept
    assert current.get() is scope
    current.reset(token)


def test_a_block_becomes_a_span_of_the_scope(emitted):
    before = time.time()
    with timed("load", shard=3):
        time.sleep(0.01)
        inside = current.get()
    [span] = emitted
    assert (inside.span, inside.parent, inside.node) == (span.id, "0" * 16, "c7")
    assert span.where == Where("digits-1", 3, "c7", group="edge-2")
    assert (span.name, span.attributes, span.trace, span.parent) == ("load", {"shard": 3}, "f" * 32, "0" * 16)
    assert span.seconds >= 0.01
    assert before <= span.at <= time.time()
    assert len(span.id) == 16


def test_nested_blocks_nest(emitted):
    with timed("outer"), timed("middle"):
        with timed("inner"):
            pass
        with timed("inner"):
            pass
    one, two, middle, outer = emitted
    assert one.parent == two.parent == middle.id
    assert middle.parent == outer.id
    assert outer.parent == "0" * 16
    assert len({span.id for span in emitted}) == 4


def test_a_scope_without_a_trace_gets_one_for_all_its_nested_blocks():
    kept = []
    token = current.set(Scope("digits-1", kept.append))
    with timed("outer"), timed("inner"):
        pass
    current.reset(token)
    inner, outer = kept
    assert inner.trace == outer.trace != ""
    assert (inner.parent, outer.parent) == (outer.id, None)


def test_as_decorator_bare_named_and_with_attributes(emitted):
    @timed
    def plain(x: int) -> int:
        """Doc."""
        return x + 1

    @timed("named", part="a")
    def named(x: int) -> int:
        return x + 1

    @timed()
    def empty(x: int) -> int:
        return x + 1

    assert plain(1) == named(1) == empty(1) == 2
    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    assert [span.name.split(".")[-1] for span in emitted] == ["plain", "named", "empty"]
    assert emitted[1].attributes == {"part": "a"}


def test_recursion_and_one_object_entered_twice(emitted):
    @timed
    def down(n: int) -> None:
        if n:
            down(n - 1)

    down(2)
    assert [span.parent for span in emitted] == [emitted[1].id, emitted[2].id, "0" * 16]
    block = timed("again")
    with block, block:
        pass
    assert emitted[3].parent == emitted[4].id


def test_coroutines_are_timed_while_they_run_and_do_not_mix(emitted):
    @timed("sleeping")
    async def sleeper(seconds: float) -> float:
        with timed("inside"):
            await asyncio.sleep(seconds)
        return seconds

    async def both() -> list[float]:
        return await asyncio.gather(sleeper(0.02), sleeper(0.01))

    assert asyncio.run(both()) == [0.02, 0.01]
    spans = {span.id: span for span in emitted}
    inside = [span for span in emitted if span.name == "inside"]
    assert len(inside) == 2
    for span in inside:
        parent = spans[span.parent]
        assert parent.name == "sleeping"
        assert parent.seconds >= span.seconds >= 0.009
        assert parent.parent == "0" * 16


def test_generators_are_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="around the loop"):

        @timed
        def batches():
            yield 1


def test_an_exception_is_noted_and_goes_on_unchanged(emitted):
    error = ValueError("bad label")
    with pytest.raises(ValueError, match="bad label") as caught, timed("train", shard=3):
        raise error
    assert caught.value is error
    span, event = emitted
    assert isinstance(span, Span)
    assert span.attributes == {"shard": 3, "error": "ValueError", "message": "bad label"}
    assert isinstance(event, Event)
    assert (event.level, event.name, event.message) == ("error", "exception", "train: ValueError: bad label")
    assert event.data == {"error": "ValueError", "block": "train", "trace": span.trace, "span": span.id}
    assert event.where == span.where


def test_ctrl_c_ends_a_span_but_is_no_failure(emitted):
    with pytest.raises(KeyboardInterrupt), timed("train"):
        raise KeyboardInterrupt
    [span] = emitted
    assert span.attributes["error"] == "KeyboardInterrupt"


def test_attributes_of_one_call_do_not_reach_the_next(emitted):
    @timed("train", shard=3)
    def train(*, fail: bool) -> None:
        if fail:
            raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        train(fail=True)
    train(fail=False)
    assert emitted[-1].attributes == {"shard": 3}


def test_a_broken_receiver_or_exception_changes_nothing_for_the_user(caplog):
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def refuse(_record) -> None:
        raise OSError("no room")

    token = current.set(Scope("digits-1", refuse))
    try:
        with pytest.raises(MuteError), timed("train"):
            raise MuteError
    finally:
        current.reset(token)
    assert "could not be handed over" in caplog.text


def test_outside_any_scope_the_time_is_only_logged(caplog):
    with caplog.at_level(logging.DEBUG, "fedvitals.telemetry"), timed("lonely"):
        assert current.get() is None
    assert "lonely took" in caplog.text
    thread = threading.Thread(target=timed(lambda: None))
    thread.start()
    thread.join()


def test_ids_are_those_of_w3c_and_leave_random_streams_alone(emitted):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the stream that users' code draws from
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert (len(new_trace()), len(new_span_id())) == (32, 16)
    assert new_trace() != new_trace()
    int(new_span_id(), 16)
    with timed("train"):
        pass
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


def test_attributes_cannot_pose_as_what_we_write(emitted):
    """The gate lets the class of an error pass; a user's attribute of that name is another thing."""
    with timed("load", error="secret", failed="secret", shard=3):
        pass
    assert emitted[0].attributes == {"own.error": "secret", "own.failed": "secret", "shard": 3}
