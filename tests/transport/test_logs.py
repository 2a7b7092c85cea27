# SPDX-License-Identifier: Apache-2.0
"""Log lines become events bound to where they were written, and never get in the way."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from fedvitals.errors import ConfigError
from fedvitals.records import Where
from fedvitals.scope import Scope, current
from fedvitals.transport.logs import EventHandler, HumanFormatter, JsonFormatter, bounded, configure, level_name

SCOPE = Scope("digits-1", emit=lambda _record: None, round=3, node="c7", group="edge-2")


@pytest.fixture
def scope():
    token = current.set(SCOPE)
    yield SCOPE
    current.reset(token)


@pytest.fixture
def log():
    """A logger of the user's, outside the tree and so away from pytest's handlers."""
    return logging.Logger("user.train")  # noqa: LOG001


@pytest.fixture
def events(log):
    kept = []
    log.addHandler(EventHandler(kept.append))
    return kept


def test_a_line_inside_a_scope_becomes_an_event(scope, log, events):
    log.info("loss %.2f", 0.5, extra={"batch": 4, "tags": ["a", None], "model": object()})
    [event] = events
    assert event.where == Where("digits-1", 3, "c7", group="edge-2")
    assert (event.level, event.name, event.message) == ("info", "log", "loss 0.50")
    assert event.data.pop("file").startswith("test_logs.py:")
    assert event.data == {"logger": "user.train", "batch": 4, "tags": ["a", None]}
    assert event.at > 1e9


def test_extra_is_kept_as_it_was_when_the_line_was_written(scope, log, events):
    sizes = [1, 2]
    log.info("sizes", extra={"sizes": sizes, "long": "x" * 5000, "longer": list(range(5000))})
    sizes.append(3)
    assert events[0].data["sizes"] == [1, 2]
    assert "longer" not in events[0].data
    assert "long" not in events[0].data


def test_a_line_outside_any_scope_is_nobodys(log, events):
    log.warning("hello")
    assert events == []


def test_a_thread_without_a_scope_uses_the_fallback(log):
    kept = []
    log.addHandler(EventHandler(kept.append, fallback=lambda: SCOPE))
    thread = threading.Thread(target=log.info, args=("from a thread",))
    thread.start()
    thread.join()
    assert kept[0].where.round == 3


def test_a_monitor_leaves_the_lines_of_another_run_alone(scope, log):
    mine, others = [], []
    log.addHandler(EventHandler(mine.append, run="digits-1"))
    log.addHandler(EventHandler(others.append, run="digits-2"))
    log.info("hello")
    assert (len(mine), len(others)) == (1, 0)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (10, "debug"),
        (5, "debug"),
        (20, "info"),
        (25, "info"),
        (30, "warning"),
        (40, "error"),
        (50, "critical"),
        (60, "critical"),
    ],
)
def test_levels_are_five(number, name):
    assert level_name(number) == name


def test_messages_are_bounded_and_fit_for_utf8(scope, log, events):
    log.info("é" * 5000)
    log.info("broken \ud800 half")
    assert len(events[0].message.encode()) <= 4096
    assert events[0].message.endswith("é…")
    assert events[1].message == "broken \\ud800 half"
    assert bounded("x" * 4096) == "x" * 4096


def test_exceptions_give_class_message_and_traceback(scope, log, events):
    """All of it: the privacy gate, further on, takes out what may not be told."""
    try:
        int("eleven")
    except ValueError:
        log.exception("client failed")
    data = events[0].data
    assert (data["exception"], data["exception_message"]) == (
        "ValueError",
        "invalid literal for int() with base 10: 'eleven'",
    )
    assert 'int("eleven")' in data["traceback"]
    log.error("none under way", exc_info=(None, None, None))
    assert "exception" not in events[1].data


def test_extra_cannot_pose_as_what_we_write(scope, log, events):
    """The gate lets a logger's name and an exception's class pass; a user's field of that name is another thing."""
    log.info("hello", extra={"exception": "secret", "logger": "secret", "traceback": "secret"})
    data = events[0].data
    assert data["logger"] == "user.train"
    assert "exception" not in data
    assert data["extra.exception"] == data["extra.traceback"] == "secret"


def test_our_own_lines_and_lines_made_while_handing_over_do_not_come_back(scope, log):
    kept = []

    def hand_over(event) -> None:
        kept.append(event)
        log.warning("a sink that logs, too")

    handler = EventHandler(hand_over)
    log.addHandler(handler)
    log.info("once")
    assert [event.message for event in kept] == ["once"]
    for name in ("fedvitals", "fedvitals.telemetry"):
        handler.handle(logging.makeLogRecord({"name": name, "levelno": 20, "msg": "ours"}))
    assert len(kept) == 1
    handler.handle(logging.makeLogRecord({"name": "fedvitals_user", "levelno": 20, "msg": "theirs"}))
    assert len(kept) == 2


def test_nothing_that_goes_wrong_reaches_the_user(scope, log, events, monkeypatch, capsys):
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    log.info("two %s %s", "one")  # noqa: PLE1206 - what users write by mistake
    log.info("%s", Mute())
    log.error("failed", exc_info=type("MuteError", (Mute, Exception), {})())
    assert events[0].message == "two %s %s ('one',)"
    assert "whose text fails" in events[1].message
    assert "whose text fails with RuntimeError" in events[2].data["exception_message"]

    def refuse(_event) -> None:
        raise OSError("no room")

    log.handlers[:] = [EventHandler(refuse)]
    log.info("lost")
    assert "no room" in capsys.readouterr().err  # as every handler of `logging` says it
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.info("lost")
    assert capsys.readouterr().err == ""


def test_the_level_of_the_handler_counts(scope, log):
    kept = []
    log.addHandler(EventHandler(kept.append, level="WARNING"))
    log.info("no")
    log.warning("yes")
    assert [event.message for event in kept] == ["yes"]


# --- on the screen ---------------------------------------------------------------------------------------------------


@pytest.fixture
def root():
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_json_lines_carry_place_extra_and_exception(scope):
    record = logging.makeLogRecord(
        {"name": "train", "levelno": 30, "msg": "slow %s", "args": ("é",), "created": 0.25, "msecs": 250.0, "batch": 4}
    )
    line = json.loads(JsonFormatter().format(record))
    assert line["at"] == "1970-01-01T00:00:00.250Z"
    assert line["message"] == "slow é"
    assert (line["level"], line["logger"], line["batch"]) == ("warning", "train", 4)
    assert (line["run"], line["round"], line["node"]) == ("digits-1", 3, "c7")
    record.exc_info = (ValueError, ValueError("x"), None)
    assert json.loads(JsonFormatter().format(record))["exception"] == "ValueError"


def test_human_lines_carry_the_place():
    record = logging.makeLogRecord({"name": "train", "levelno": 20, "msg": "hello"})
    assert HumanFormatter().format(record).endswith(" info     train: hello")
    token = current.set(SCOPE)
    try:
        assert HumanFormatter().format(record).endswith(" info     digits-1 round 3 c7  train: hello")
        record.exc_info = (ValueError, ValueError("x"), None)
        assert HumanFormatter().format(record).endswith("train: hello\nValueError: x")
    finally:
        current.reset(token)


def test_configure_installs_one_handler_however_often_it_is_called(root):
    first, second = io.StringIO(), io.StringIO()
    before = len(root.handlers)
    handler = configure(stream=first)
    assert configure(json=True, level="debug", stream=second) is handler
    assert len(root.handlers) == before + 1
    assert root.level == logging.DEBUG
    logging.getLogger("user.train").debug("hello")
    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["message"] == "hello"


def test_configure_refuses_a_level_that_does_not_exist(root):
    with pytest.raises(ConfigError, match=r"Unknown log level 'INFOO'\..*Did you mean 'INFO'"):
        configure(level="INFOO")
