# SPDX-License-Identifier: Apache-2.0
"""W3C trace context: what the standard's own examples ask, and a client's spans as children of the server's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.errors import ConfigError
from fedvitals.records import Where
from fedvitals.scope import Scope, current
from fedvitals.transport.timing import timed
from fedvitals.transport.traceparent import TraceParent, arrived, carried, entered, read_traceparent, traceparent
from support.conditions import holds_for_each

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceParent(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", TraceParent(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-03", TraceParent(TRACE, SPAN, sampled=True)),  # a flag that we do not know
        (f" 00-{TRACE}-{SPAN}-01\t", TraceParent(TRACE, SPAN)),
        (f"cc-{TRACE}-{SPAN}-01", TraceParent(TRACE, SPAN)),  # a version that does not exist yet
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", TraceParent(TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-01-what-the-future-will-be-like", None),
        (f"cc-{TRACE}-{SPAN}-01.what-the-future", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE[:-1]}-{SPAN}-01", None),
        (f"0-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f"00-{TRACE}-{'٣' * 16}-01", None),  # digits, but not those that are meant
        ("", None),
        (None, None),
        (3, None),
    ],
)
def test_headers_are_read_as_the_standard_asks(header, expected):
    assert read_traceparent(header) == expected


@given(st.text())
def test_any_text_is_read_or_left(text):
    found = read_traceparent(text)
    assert found is None or read_traceparent(str(found)) == found


def test_a_scope_goes_out_and_comes_in():
    sent = Scope("run-1", print, 12, trace=TRACE, span=SPAN)
    assert traceparent(sent) == f"00-{TRACE}-{SPAN}-01"
    headers = carried(sent, node="Krankenhaus, Süd=1", group="edge-2")
    assert holds_for_each(value.isascii() and "\n" not in value for value in headers.values())
    found = arrived({name.title(): value for name, value in headers.items()}, print)
    assert (found.run, found.round, found.node, found.group) == ("run-1", 12, "Krankenhaus, Süd=1", "edge-2")
    assert (found.trace, found.span) == (TRACE, SPAN)


def test_what_a_client_does_is_a_child_of_the_servers_span():
    records = []
    headers = carried(Scope("run-1", print, 12, trace=TRACE, span=SPAN), node="c7")
    with entered(arrived(headers, records.append)) as scope, timed("train"):
        back = carried(scope if current.get() is None else current.get())
        with timed("epoch"):
            pass
    epoch, train = records
    assert (train.trace, train.parent, train.where) == (TRACE, SPAN, Where("run-1", 12, "c7"))
    assert epoch.parent == train.id
    assert read_traceparent(back["traceparent"]) == TraceParent(TRACE, train.id), "the way back"
    assert current.get() is None


def test_a_message_without_headers_begins_a_new_trace():
    found = arrived({"traceparent": "nonsense"}, print, run="run-1", node="c7")
    assert (found.run, found.node, found.round, found.span) == ("run-1", "c7", None, None)
    assert len(found.trace) == 32
    with pytest.raises(ConfigError, match="name no run"):
        arrived({"traceparent": f"00-{TRACE}-{SPAN}-01"}, print)


def test_baggage_of_others_is_left_alone():
    baggage = "user=alice;secret, fedvitals.run.id = run-1 ;p=1,fedvitals.round=-3,fedvitals.node=a%0Ab,,=,x"
    found = arrived({"baggage": baggage}, print)
    assert (found.run, found.round, found.node) == ("run-1", None, None)
