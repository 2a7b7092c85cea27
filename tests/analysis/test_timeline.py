# SPDX-License-Identifier: Apache-2.0
"""From Spans to what every node did in a round: parts that sum to it, whatever the Spans say."""

import math
import random

import pytest

from fedvitals import lab
from fedvitals.analysis.timeline import main_clock, rounds_of_clock, timeline, waiting_for
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span, Where
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.lab.timed import BUSY, TOPOLOGIES
from support.spans_by_hand import STARTED, in_turn, journey, server, side_by_side, span, whole


def sums_to_its_round(time):
    for node in time.nodes.values():
        assert sum(node.parts.values()) == pytest.approx(time.seconds, rel=1e-3, abs=1e-4), node
        assert holds_for_each(seconds >= 0 for seconds in node.parts.values())
        at = time.began
        for one in node.intervals:
            assert one.began == pytest.approx(at, abs=1e-4)
            at = one.began + one.seconds
        assert at == pytest.approx(time.ends, abs=1e-4)


def test_journeys_on_the_virtual_clock():
    first = side_by_side({"c1": {"download": 1.0, "compute": 2.0, "upload": 3.0}, "c2": {"compute": 2.0}})
    second = side_by_side({"c1": {"compute": 1.0}, "c10": {"compute": 2.0}, "c2": {"away": 2.0}}, 1, began=8.0)
    one, two = timeline([*second, *first])
    assert (one.round, one.clock, one.seconds, one.complete, one.left_out) == (0, "virtual", 6.5, True, 0)
    assert one.nodes["c1"].parts == {"download": 1.0, "compute": 2.0, "upload": 3.0, "wait": 0.5}
    assert one.nodes["c2"].parts == {"compute": 2.0, "wait": 4.5}
    assert one.server.parts == {"wait": 6.0, "aggregate": 0.5}
    assert [i.part for i in one.nodes["c1"].intervals] == ["download", "compute", "upload", "wait"]
    assert one.idle == 0
    assert two.idle == pytest.approx(1.5, abs=1e-6)
    assert [*two.nodes] == ["server", "c1", "c2", "c10"]
    assert waiting_for(one) == {"server": "c1", "c1": "server", "c2": "c1"}
    assert two.nodes["c2"].busy == 0
    for time in (one, two):
        sums_to_its_round(time)


def test_a_plain_loop_tells_queue_and_wait_by_timestamps_and_what_no_part_explains():
    spans = in_turn({"c1": 2.0, "c2": 3.0}, gap=0.5, after=1.0, shares={"forward": 0.25, "backward": 0.5})
    (time,) = timeline(spans)
    assert time.seconds == 7.0
    assert time.nodes["c2"].parts == pytest.approx(
        {"queue": 2.5, "forward": 0.75, "backward": 1.5, "unaccounted": 0.75, "wait": 1.5}
    )
    assert time.nodes["c1"].parts["wait"] == pytest.approx(5.0)
    assert time.unaccounted == pytest.approx(0.75 / 7)
    assert holds_for_each(
        i.folded == (i.part in ("forward", "backward", "unaccounted")) for i in time.nodes["c2"].intervals
    )
    sums_to_its_round(time)


def test_a_clients_training_says_what_its_journey_computed():
    way = journey("c1", ends=10.0, clock="real", download=1.0, queue=0.5, data=0.0, compute=4.0, upload=2.0)
    own = span("c1", "client", 900.0, 4.0, parent=way.id, parts={"data": 1.0, "forward": 1.0, "backward": 1.5})
    (time,) = timeline([whole(10.0), way, own])
    assert time.nodes["c1"].parts == pytest.approx(
        {
            "download": 1,
            "queue": 0.5,
            "upload": 2,
            "wait": 2.5,
            "data": 1,
            "forward": 1,
            "backward": 1.5,
            "unaccounted": 0.5,
        }
    )
    sums_to_its_round(time)
    lying = span("c1", "client", 1.0, 4.0, parent=way.id, parts={"forward": 300.0, "backward": 100.0}, folded=True)
    (time,) = timeline([whole(10.0), way, lying])
    assert time.nodes["c1"].parts["forward"] == pytest.approx(3.0)
    sums_to_its_round(time)


def test_a_journey_to_and_fro_waits_only_at_its_ends():
    parts = {"queue": 1.0, "download": 2.0, "compute": 2.0, "upload": 3.0, "wait": 2.0}
    way = span("c1", "journey", 0.0, 10.0, group="ring-1", parts=parts, folded=True)
    (time,) = timeline([whole(10.0), way])
    blocks = time.nodes["c1"].blocks
    assert [(block.seconds, block.folded) for block in blocks] == [(1.0, False), (7.0, True), (2.0, False)]
    assert time.nodes["c1"].parts == parts
    sums_to_its_round(time)


def test_an_asynchronous_journey_is_cut_to_the_round_and_kept_whole_beside():
    way = journey("c1", began=-5.0, ends=2.0, download=1.0, compute=3.0, upload=2.5)
    (time,) = timeline([whole(2.0, clock="virtual"), way])
    assert time.overlapping
    assert time.nodes["c1"].parts == pytest.approx({"upload": 1.5, "wait": 0.5})
    assert time.nodes["c1"].reported["compute"] == 3.0
    sums_to_its_round(time)


def test_clocks_that_are_wrong_are_put_right():
    spans = in_turn({"c1": 2.0, "c2": 2.0})
    early = span("c3", "client", -3600.0, 1.0, parts={"forward": 1.0})
    late = span("c4", "client", 3.5, 1.0, parts={"forward": 1.0})
    (time,) = timeline([*spans, early, late])
    assert time.shifted == pytest.approx({"c3": 3600.0, "c4": -0.5})
    assert time.nodes["c4"].parts == pytest.approx({"queue": 3.0, "forward": 1.0})
    sums_to_its_round(time)


def test_an_edge_waits_while_its_members_are_under_way():
    ways = {"c1": {"compute": 2.0}, "c2": {"compute": 4.0}}
    spans = side_by_side(ways, groups={"c1": "edge-0", "c2": "edge-0"})
    edge = span("edge-0", "edge", 0.0, 4.5, group="edge-0", clock="virtual", parts={"aggregate": 0.25})
    (time,) = timeline([*spans, edge])
    assert time.nodes["edge-0"].parts == pytest.approx({"wait": 4.0, "aggregate": 0.25, "unaccounted": 0.25})
    assert [one.node for one in time.edges] == ["edge-0"]
    sums_to_its_round(time)


def test_a_round_that_never_closed_is_as_long_as_what_is_known_of_it():
    (time,) = timeline([journey("c1", ends=4.0, compute=3.0), server(4.0, wait=4.0)])
    assert (time.complete, time.seconds) == (False, 4.0)
    sums_to_its_round(time)


def test_what_cannot_be_true_is_left_out_and_counted():
    good = in_turn({"c1": 2.0, "c2": 2.0})
    bad = [
        span("c3", "client", 0.0, math.nan),
        span("c4", "client", 0.0, -1.0),
        span("c5", "client", 0.0, 1e300),
        span("c6", "client", math.inf, 1.0),
        good[1],  # a second time
        span(None, "client", 0.0, 1.0),
        span("c7", "client", 0.0, 1.0, parts={"forward": 10**400, "backward": "much", "nonsense": 1.0}),
        span("c8", "client", 0.0, 1.0, parts=[1, 2], stacked=-4, samples="all", waited_for=3),
        span("c9", "dance", 0.0, 1.0),
        Span(Where("r", None, "c1"), STARTED, "client", 1.0, "t", "x"),
    ]
    (time,) = timeline([*good, *bad])
    assert time.left_out == 6
    assert set(time.nodes) == {"c1", "c2", "c7", "c8"}
    assert time.nodes["c8"].samples is None
    sums_to_its_round(time)


def test_only_the_whole_tells_of_the_round_and_only_the_server_of_itself():
    """A client that sends a Span called «round» or «server», or one with the round's own id, changes nothing."""
    good = side_by_side({"c1": {"compute": 2.0}, "c2": {"compute": 2.0}})
    lies = [
        span("c1", "round", 5.0, 600.0, own="later", clock="virtual"),
        span("c1", "server", 0.0, 600.0, own="mine", clock="virtual", parts={"aggregate": 600.0}),
        span("c1", "client", 0.0, 1.0, own=good[0].id, clock="virtual"),
    ]
    (honest,), (time,) = timeline(good), timeline([*lies, *good])
    assert (time.began, time.seconds, time.complete, time.left_out) == (honest.began, 2.5, True, 2)
    assert time.server.parts == honest.server.parts
    assert set(time.nodes) == set(honest.nodes)


@pytest.mark.thorough
def test_numbers_of_nodes_and_spans_are_bounded():
    crowd = [span(f"n{i}", "client", 0.0, 1.0) for i in range(10_050)]
    many = [span("n1", "client", i / 1000, 0.001, own=f"again {i}") for i in range(100)]
    (time,) = timeline([whole(2.0), *crowd, *many])
    assert len(time.nodes) == 10_000
    assert time.left_out == 50 + 100 - 31


def test_nothing_that_a_span_says_raises():
    chance = random.Random(3)
    numbers = [0.0, 1.0, -1.0, 1e-9, 1e9, 1e308, math.inf, -math.inf, math.nan, 3.5]
    names = ["round", "server", "edge", "journey", "client"]
    for _ in range(200):
        spans = []
        for i in range(chance.randrange(12)):
            parts = {p: chance.choice(numbers) for p in chance.sample(["data", "compute", "wait", "queue", "x"], 3)}
            more = {"folded": chance.random() < 0.5} | ({"clock": "virtual"} if chance.random() < 0.3 else {})
            node = chance.choice([None, "server", "c1", "c2", "edge-0"])
            at, lasts = chance.choice(numbers), chance.choice(numbers)
            made = span(node, chance.choice(names), at, lasts, group="edge-0", own=f"s{i}", parts=parts, **more)
            spans.append(made)
        for time in timeline(spans):
            assert time.seconds >= 0
            for node in time.nodes.values():
                assert sum(node.parts.values()) == pytest.approx(time.seconds, rel=1e-3, abs=1e-4)
                assert math.isfinite(sum(i.seconds for i in node.intervals))


EVERY_WAY = {**TOPOLOGIES, "asynchronous": lab.Asynchronous(buffer=3)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY_WAY)
def test_parts_of_real_runs_sum_to_the_round_on_both_clocks(name):
    e = lab.Experiment(clients=9, rounds=3, network=BUSY, topology=EVERY_WAY[name], model="mlp")
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        lab.run(e, monitor)
    times = timeline(record for record in sink.records if isinstance(record, Span))
    assert main_clock(times) == "virtual"
    for clock in ("virtual", "real"):
        own = rounds_of_clock(times, clock)
        assert [time.round for time in own] == [0, 1, 2]
        for time in own:
            assert time.left_out == 0
            assert time.clients
            sums_to_its_round(time)
            if clock == "virtual":
                assert time.unaccounted < 1e-6
