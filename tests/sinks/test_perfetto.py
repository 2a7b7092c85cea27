# SPDX-License-Identifier: Apache-2.0
"""The trace for ui.perfetto.dev, held against the rules of Chrome's trace event format.

Perfetto's own reader (trace_processor) is a binary that its Python package loads from the internet; here it is not.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, Finding, Metric, Run, Span, Transfer, Where
from fedvitals.sinks.perfetto import perfetto
from fedvitals.testing import MemorySink, tiny_run
from support.conditions import holds_for_each

RUN = Run("r1", "digits", started=1000.0)


def trace(run, spans, **more) -> list[dict]:
    """The events of the trace, which keep the rules of the format."""
    text = "".join(perfetto(run, spans, **more))
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    check(document["traceEvents"])
    return document["traceEvents"]


def check(events: list[dict]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    slices = defaultdict(list)
    flows = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXiCsf"
        assert isinstance(event["name"], str)
        assert event["pid"] in processes
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] in "Xisf":
            assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            begin = round(event["ts"] * 1000)
            slices[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
        if event["ph"] == "C":
            assert holds_for_each(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
            assert event["ph"] == "s" or event["bp"] == "e"
    for found in slices.values():
        check_nesting(found)
    for start, end in flows.values():
        assert (start["ph"], end["ph"]) in (("s", "f"), ("f", "s"))
        for one in (start, end):  # an arrow binds to a slice around it
            at = round(one["ts"] * 1000)
            assert any(begin <= at < stop for begin, stop in slices[one["pid"], one["tid"]])


def check_nesting(slices: list[tuple[int, int]]) -> None:
    """Any two are apart, or one lies in the other: as a reader does it, with a stack."""
    open_ends: list[int] = []
    for begin, end in sorted(slices, key=lambda ends: (ends[0], -ends[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def names(events, what="process_name") -> list[str]:
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == what]


def thread_of(events, event) -> tuple[str, str]:
    process = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    thread = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return process[event["pid"]], thread[event["tid"]]


def span(name, node, at, seconds, round_=0, group=None, own="a" * 16, parent=None, **attributes) -> Span:
    return Span(Where("r1", round_, node, group=group), 1000.0 + at, name, seconds, "t", own, parent, attributes)


def test_nodes_are_threads_of_their_group():
    spans = [
        span("round", None, 0, 10),
        span("server", "server", 0, 10, parts={"wait": 8.0, "aggregate": 2.0}),
        span("edge", "edge-0", 0, 8),
        span("client", "c10", 1, 2, group="edge-0"),
        span("client", "c2", 3, 4, group="edge-0"),
        span("client", "lonely", 3, 4),
    ]
    events = trace(RUN, spans)
    assert names(events) == ["server", "clients", "edge-0"]
    assert names(events, "thread_name") == ["rounds", "server", "lonely", "c2", "c10", "edge-0"]
    by_name = {e["name"]: e for e in events if e["ph"] == "X"}
    assert thread_of(events, by_name["edge"]) == ("edge-0", "edge-0")
    assert (by_name["round 0"]["ts"], by_name["round 0"]["dur"]) == (0, 10e6)
    wait, aggregate = by_name["wait"], by_name["aggregate"]
    assert thread_of(events, wait) == ("server", "server")
    assert (aggregate["ts"], aggregate["dur"]) == (wait["ts"] + wait["dur"], 2e6)


def test_what_overlaps_in_part_gets_a_lane_of_its_own():
    events = trace(RUN, [span("a", "c1", 0, 3), span("b", "c1", 2, 3), span("c", "c1", 4, 1), span("d", "c1", 0.5, 1)])
    lanes = {e["name"]: thread_of(events, e)[1] for e in events if e["ph"] == "X"}
    assert lanes == {"a": "c1", "b": "c1 (2)", "c": "c1", "d": "c1"}


def test_clocks_are_apart():
    spans = [span("round", None, 0, 1), span("round", None, 0, 500, clock="virtual")]
    events = trace(RUN, spans)
    assert names(events) == ["server", "server (virtual clock)"]


def test_ways_of_the_virtual_clock_are_arrows():
    parts = {"queue": 1.0, "download": 2.0, "compute": 3.0, "upload": 4.0}
    whole = span("round", None, 0, 12, own="b" * 16, clock="virtual")
    journey = span("journey", "c1", 0, 10, parent="b" * 16, clock="virtual", parts=parts)
    events = trace(RUN, [whole, journey])
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = thread_of(events, event)[1], event["ts"]
    (down, up) = arrows.values()
    assert (down["s"][0], down["f"][0]) == ("rounds traffic", "c1")
    assert (up["s"][0], up["f"][0]) == ("c1", "rounds traffic")
    assert down["s"][1] == 1e6 <= down["f"][1]
    assert up["s"][1] <= up["f"][1]


def test_transfers_are_arrows_and_counted():
    told = [
        Transfer(Where("r1", 0, "c1"), 1005.0, "server", "c1", 1000, 4000, 2.0, "model"),
        Transfer(Where("r1", 0, "c1"), 1009.0, "c1", "server", 500, 4000, None, "update"),
    ]
    events = trace(RUN, [span("client", "c1", 0, 9, group="edge-0")], transfers=told)
    sent = next(e for e in events if e["name"] == "model to c1")
    assert (sent["ts"], sent["dur"], sent["args"]["bytes"]) == (3e6, 2e6, 1000)
    taken = next(e for e in events if e["name"] == "model from server")
    assert thread_of(events, taken) == ("edge-0", "c1 traffic")
    assert sum(e["ph"] in "sf" for e in events) == 4
    assert [e["args"]["traffic.bytes"] for e in events if e["ph"] == "C"] == [1000.0, 1500.0]


def test_findings_and_failures_are_instants_and_accuracy_a_counter():
    events = trace(
        RUN,
        [span("client", "c1", 0, 9, round_=2, group="edge-0")],
        events=[
            Event(Where("r1", 2, "c1"), 1004.0, "error", "client.failed", "OSError: <b>disk</b>"),
            Event(Where("r1", 2, "c1"), 1004.0, "info", "log", "all is well"),
        ],
        findings=[Finding(Where("r1", 2, "c1"), 1005.0, "label_flip", "critical", math.nan, "c1 stands out")],
        metrics=[
            Metric(Where("r1", 2), 1006.0, "accuracy", 0.5),
            Metric(Where("r1", 3), 1007.0, "accuracy", math.nan),
            Metric(Where("r1", 2, "c1"), 1006.0, "accuracy", 0.9),
        ],
    )
    instants = [e for e in events if e["ph"] == "i"]
    assert [e["name"] for e in instants] == ["client.failed", "finding: label_flip"]
    assert {thread_of(events, e) for e in instants} == {("edge-0", "c1")}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"accuracy": 0.5}]


def test_one_round_alone():
    spans = [span("round", None, i, 1, round_=i) for i in range(5)]
    events = trace(RUN, spans, rounds={3})
    assert [e["name"] for e in events if e["ph"] == "X"] == ["round 3"]


def test_a_run_without_anything_is_a_trace_without_anything():
    assert trace(RUN, []) == []


@pytest.mark.thorough
def test_a_run_on_the_real_clock():
    kept = MemorySink()
    monitor = tiny_run(None, sinks=[kept], detectors=[])
    spans = kept.of(Span)
    events = trace(monitor.run, spans, events=kept.events(), metrics=kept.metrics())
    slices = [e["name"] for e in events if e["ph"] == "X"]
    assert slices.count("client") == 12
    assert {"c0", "c1", "c2", "c3"} <= set(names(events, "thread_name"))
    # Within a microsecond, a slice is as long as its span.
    lengths = sorted(e["dur"] for e in events if e["name"] == "client")
    wanted = sorted(s.seconds * 1e6 for s in spans if s.name == "client")
    assert lengths == pytest.approx(wanted, abs=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "topology", [lab.Centralized(), lab.Hierarchical(edges=2)], ids=["centralized", "hierarchical"]
)
def test_a_run_on_both_clocks(topology):
    kept = MemorySink()
    experiment = lab.Experiment(
        dataset="digits", model="mlp", clients=4, rounds=2, seed=1, topology=topology, network=lab.Network()
    )
    with Monitor(None, sinks=[kept], detectors=[]) as monitor:
        lab.run(experiment, observer=monitor)
    events = trace(
        monitor.run,
        kept.of(Span),
        transfers=kept.of(Transfer),
        metrics=kept.metrics(),
        events=kept.events(),
    )
    processes = names(events)
    assert any(name.endswith("(virtual clock)") for name in processes)
    assert any(not name.endswith("(virtual clock)") for name in processes)
    assert any(e["ph"] == "s" for e in events)


SPANS = st.builds(
    lambda name, node, at, seconds, group, virtual, parts: span(
        name, node, at, seconds, group=group, parts=parts, **({"clock": "virtual"} if virtual else {})
    ),
    st.sampled_from(["client", "journey", "a\n\ud800\"'<b>"]),
    st.sampled_from([None, "server", "c1", "c2", "edge-0", "x" * 1000, "c²"]),
    st.floats(),
    st.floats(),
    st.sampled_from([None, "edge-0"]),
    st.booleans(),
    st.dictionaries(st.sampled_from(["download", "upload", "wait"]), st.floats()),
)


@given(st.lists(SPANS, max_size=12), st.lists(st.tuples(st.floats(), st.none() | st.floats()), max_size=5))
def test_whatever_is_told_the_rules_hold(spans, moments):
    transfers = [Transfer(Where("r1", 0, "c1"), at, "server", "c1", 1, 1, seconds) for at, seconds in moments]
    trace(RUN, spans, transfers=transfers)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=20))
def test_lanes_hold_all_slices(pairs):
    spans = [span("a", "c1", at * 1e-6, seconds * 1e-6) for at, seconds in pairs]
    events = trace(RUN, spans)
    assert sum(e["ph"] == "X" for e in events) == len(pairs)
    lanes = len({e["tid"] for e in events if e["ph"] == "X"})
    alone = all(b[0] >= a[0] + a[1] for a, b in itertools.pairwise(sorted(pairs)))
    assert lanes == 1 or not alone
