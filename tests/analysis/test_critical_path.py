# SPDX-License-Identifier: Apache-2.0
"""The chain that determined a round, who held it up, and what rounds and runs are bound by."""

import math
import random

import pytest

from fedvitals.analysis.bottleneck import KINDS, judge, judge_round
from fedvitals.analysis.critical_path import critical_path, format_seconds
from fedvitals.analysis.round_shape import shape_of
from fedvitals.analysis.stragglers import stragglers
from fedvitals.analysis.timeline import timeline
from support.spans_by_hand import in_turn, journey, server, side_by_side, span, whole


def only(spans):
    (time,) = timeline(spans)
    return time


def links(path):
    return [(link.node, link.part, round(link.seconds, 4)) for link in path.links]


def without(time, nodes):
    return shape_of(time).without(nodes)


WAYS = {
    "c3": {"download": 0.4, "compute": 1.5, "upload": 1.0},
    "c7": {"download": 0.4, "compute": 2.0, "upload": 5.2},
    "c9": {"download": 0.4, "compute": 1.2, "upload": 0.9},
}


def test_the_chain_of_a_synchronous_round_and_its_words():
    time = only(side_by_side(WAYS, number=12))
    path = critical_path(time)
    assert links(path) == [
        ("c7", "download", 0.4),
        ("c7", "compute", 2.0),
        ("c7", "upload", 5.2),
        ("server", "aggregate", 0.5),
    ]
    assert path.text == "round 12 took 8.1 s: c7's upload, 5.2 s; without c7 3.4 s"
    assert (path.slowest, path.part, path.part_seconds) == ("c7", "upload", pytest.approx(5.2))
    assert path.without == pytest.approx(3.4) == without(time, ["c7"])
    assert without(time, ["c3"]) == pytest.approx(8.1)
    assert without(time, ["c7", "c3"]) == pytest.approx(3.0)
    assert sum(path.shares.values()) == pytest.approx(1.0)
    assert path.shares["upload"] == pytest.approx(5.2 / 8.1)


def test_a_plain_loop_is_a_chain_of_all_clients():
    spans = in_turn({f"c{i}": 1.0 + i / 10 for i in range(5)}, gap=0.1, after=0.4)
    told = server(6.9, clock="real", folded=True, wait=6.0, receive=0.25, aggregate=0.2, evaluate=0.3)
    time = only([*spans, told])
    path = critical_path(time)
    assert [link.node for link in path.links if link.node != "server"] == ["c0", "c1", "c2", "c3", "c4"]
    assert sum(link.seconds for link in path.links) == pytest.approx(time.seconds)
    assert links(path)[-2:] == [("server", "aggregate", 0.2), ("server", "evaluate", 0.3)]
    assert path.text == "round 0 took 6.9 s: 5 clients one after the other, 6 s; without c4 5.42 s"
    assert path.without == pytest.approx(6.9 - 1.4 - 0.08, abs=0.01)
    assert path.shares["compute"] == pytest.approx(0.8 * 6.0 / 6.9)
    assert path.shares["data loading"] == pytest.approx(0.2 * 6.0 / 6.9)


def test_workers_take_clients_as_they_become_free():
    """Two workers: c1 0-3, c2 0-5, c3 3-6, c4 5-9. The chain is c2, c4; without c2 it is list scheduling that tells."""
    parts = {"parts": {"compute": 1.0}, "folded": True}
    turns = {"c1": (0, 3), "c2": (0, 5), "c3": (3, 6), "c4": (5, 9)}
    spans = [span(n, "client", a, b - a, **{**parts, "parts": {"compute": b - a}}) for n, (a, b) in turns.items()]
    time = only([whole(9.5), *spans])
    path = critical_path(time)
    assert links(path) == [("c2", "compute", 5.0), ("c4", "compute", 4.0), ("server", "unaccounted", 0.5)]
    assert path.shape.slots == 2
    assert path.shape.length() == pytest.approx(9.5)
    assert without(time, ["c2"]) == pytest.approx(7.5)  # c1 and c3 beside each other, then c4
    assert "4 clients 2 at a time" in path.text


def test_clients_that_take_turns_on_one_thread_are_pooled():
    parts = {"forward": 0.5, "backward": 1.0, "wait": 4.5}
    spans = [span(f"c{i}", "client", 0.0, 6.0, parts=parts, folded=True) for i in range(4)]
    path = critical_path(only([whole(6.0), *spans]))
    (link,) = path.links
    assert link.shared == 4
    assert link.parts == pytest.approx({"forward": 2.0, "backward": 4.0})
    assert path.shape.slots == 1
    assert path.without == pytest.approx(4.5)


def test_an_edge_and_its_own_way_stand_on_the_chain():
    ways = {"c1": {"compute": 4.0, "upload": 1.0}, "c2": {"compute": 1.0, "upload": 1.0}}
    groups = {"c1": "edge-0", "c2": "edge-1"}
    spans = side_by_side(ways, aggregate=2.5, groups=groups)[2:]
    edges = [
        span("edge-0", "edge", 0.0, 7.0, group="edge-0", clock="virtual", parts={"wait": 5.0, "upload": 2.0}),
        span("edge-1", "edge", 0.0, 3.0, group="edge-1", clock="virtual", parts={"wait": 2.0, "upload": 1.0}),
    ]
    time = only([whole(7.5, clock="virtual"), server(7.5, wait=7.0, aggregate=0.5), *edges, *spans])
    path = critical_path(time)
    assert [link[0] for link in links(path)] == ["c1", "c1", "edge-0", "server"]
    assert without(time, ["c1"]) == pytest.approx(3.5)
    assert without(time, ["edge-0", "c1"]) == pytest.approx(3.5)


def test_a_client_that_queues_waits_for_who_is_served_before_it():
    spans = [whole(6.0, clock="virtual")]
    spans += [journey(f"c{i}", ends=6.0, queue=float(i), download=1.0, compute=1.0) for i in range(5)]
    path = critical_path(only(spans))
    assert [link[:2] for link in links(path)] == [(f"c{i}", "download") for i in range(5)] + [("c4", "compute")]
    assert path.shares["download"] == pytest.approx(5 / 6)


def test_waiting_for_what_never_comes_is_no_ones_work():
    spans = [whole(9.0, clock="virtual"), server(9.0, wait=8.5, aggregate=0.5), journey("c1", ends=9.0, compute=2.0)]
    path = critical_path(only(spans))
    assert links(path)[1] == ("server", "wait", 6.5)
    assert judge_round(only(spans)).kind == "nothing"


def test_broken_spans_have_a_path_and_a_verdict_too():
    chance = random.Random(5)
    numbers = [0.0, 1.0, 1e-9, 3.5, 1e6, math.nan, -2.0]
    for _ in range(150):
        spans = [whole(chance.choice([0.0, 4.0, 1e5]))] if chance.random() < 0.8 else []
        for i in range(chance.randrange(8)):
            parts = {p: chance.choice(numbers) for p in chance.sample(["data", "compute", "wait", "upload"], 2)}
            name, folded = chance.choice(["server", "edge", "journey", "client"]), chance.random() < 0.5
            node = "server" if name == "server" else chance.choice(["c1", "c2", "c3", "edge-0"])
            at = chance.choice([0.0, 1.0, -3.0, 2.5])
            spans.append(span(node, name, at, chance.choice(numbers), own=f"s{i}", parts=parts, folded=folded))
        for time in timeline(spans):
            path = critical_path(time)
            assert sum(link.seconds for link in path.links) == pytest.approx(time.seconds, rel=0.01, abs=1e-3)
            assert judge_round(time).kind in KINDS
        judge(timeline(spans))


def run(ways, rounds=6, **more):
    spans, at = [], 0.0
    for number in range(rounds):
        made = side_by_side(ways(number) if callable(ways) else ways, number, at, **more)
        spans += made
        at += made[0].seconds
    return timeline(spans)


EVEN = {"download": 0.3, "data": 0.3, "compute": 0.3, "upload": 0.3}
KIND_OF = {"upload": "upload", "download": "download", "compute": "compute", "data": "data loading"}


@pytest.mark.parametrize("part", KIND_OF)
def test_the_part_that_takes_longest_on_all_clients_is_what_a_run_is_bound_by(part):
    verdict = judge(run({f"c{i}": {**EVEN, part: 2.0 + i / 10} for i in range(8)}))
    assert verdict.kind == KIND_OF[part]
    assert verdict.share > 0.5
    assert f"{KIND_OF[part].replace(' ', '-')}-bound" in verdict.text
    assert verdict.evidence["kinds"] == {KIND_OF[part]: 6}
    assert verdict.stragglers == ()


def test_aggregation_server_and_nothing():
    ways = {f"c{i}": EVEN for i in range(5)}
    assert judge(run(ways, aggregate=2.0)).kind == "aggregation"
    assert judge(run(ways, aggregate=0.3)).kind == "nothing"
    spans = [whole(3.0, clock="virtual"), server(3.0, wait=1.2, aggregate=0.2, evaluate=1.6)]
    assert judge(timeline([*spans, *(journey(f"c{i}", ends=3.0, **EVEN) for i in range(5))])).kind == "server"
    assert judge([]) is None


def test_one_slow_client_is_a_straggler_and_what_it_is_slow_in_is_named():
    ways = {f"c{i}": {"compute": 2.0 + i / 10, "upload": 0.5} for i in range(9)} | {
        "c7": {"compute": 2.4, "upload": 6.0}
    }
    verdict = judge(run(ways))
    assert (verdict.kind, verdict.stragglers, verdict.bound_by) == ("straggler", ("c7",), "upload")
    assert verdict.without == pytest.approx(3.8)
    assert verdict.share == pytest.approx(1 - 3.8 / 8.9)
    assert "it waits for c7, slow in upload, and takes 3.8 s without c7" in verdict.text


def test_a_different_slow_client_in_every_round_is_chance():
    def ways(number):
        return {f"c{i}": {"compute": 2.0, "upload": 6.0 if i == number else 0.5} for i in range(12)}

    verdict = judge(run(ways, rounds=8))
    assert {one.kind for one in verdict.by_round} == {"straggler"}
    assert (verdict.kind, verdict.stragglers) == ("upload", ())


def test_a_slow_half_is_a_kind_of_device():
    ways = {f"c{i}": {"compute": 6.0 if i % 2 else 1.0} for i in range(10)}
    assert judge(run(ways)).kind == "compute"


def test_equal_clients_that_take_turns_are_no_stragglers():
    spans = [s for n in range(4) for s in in_turn({"c1": 2.0, "c2": 2.0, "c3": 2.0}, n, 6.0 * n)]
    assert judge(timeline(spans)).kind == "compute"
    slow = [s for n in range(4) for s in in_turn({"c1": 2.0, "c2": 9.0, "c3": 2.0}, n, 13.0 * n)]
    verdict = judge(timeline(slow))
    assert (verdict.kind, verdict.stragglers) == ("straggler", ("c2",))


def warm(first, rounds=6):
    """Rounds of a plain loop on the real clock, of which the first takes so long before anybody trains."""
    spans, at = [], 0.0
    for number in range(rounds):
        extra = first if number == 0 else 0.0
        made = in_turn({"c1": 0.03, "c2": 0.03, "c3": 0.03}, number, at + extra, shares={"data": 0.9, "forward": 0.1})
        spans += [whole(made[0].seconds + extra, number, at), *made[1:]]
        at += made[0].seconds + extra
    return timeline(spans)


def test_a_run_is_judged_without_its_warm_up():
    verdict = judge(warm(2.0))
    assert (verdict.kind, verdict.rounds, len(verdict.by_round)) == ("data loading", 6, 6)
    assert verdict.share == pytest.approx(0.9)
    assert verdict.seconds == pytest.approx(0.09)
    assert verdict.text.endswith(" Round 0 took 2.09 s, a warm-up of 2 s.")
    assert judge(warm(0.03)).warm_up is None, "half as long again is no warm-up"
    assert judge(warm(2.0, rounds=2)).warm_up is None, "of two, nobody says which one is usual"


def test_a_warm_up_makes_nobody_a_straggler_and_a_slow_link_is_none():
    spans, at = [], 0.0
    for number in range(5):
        made = in_turn({"c1": 5.0 if number == 0 else 1.0, "c2": 1.0, "c3": 1.1, "c4": 1.0}, number, at)
        spans += made
        at += made[0].seconds
    assert [one.node for one in stragglers(timeline(spans), most=1)] == ["c3"]
    spans, at = [], 0.0
    for number in range(5):
        spans += [whole(9.0 if number == 0 else 3.0, number, at)]
        way = {"compute": 1.0, "upload": 8.0 if number == 0 else 2.0}
        spans += [journey(f"c{i}", number, at, clock="real", **way) for i in range(4)]
        at += spans[-5].seconds
    assert judge(timeline(spans)).warm_up is None


def test_one_round_that_was_held_up_once_does_not_decide():
    def ways(number):
        return {f"c{i}": {"compute": 90.0 if number == 3 else 0.2, "upload": 1.0} for i in range(5)}

    assert judge(run(ways, aggregate=0.0)).kind == "upload"


def test_upload_and_download_that_are_equal_are_named_together():
    even = {"download": 0.48, "compute": 0.04, "upload": 0.48}
    verdict = judge(run({f"c{i}": even for i in range(5)}, aggregate=0.0))
    assert verdict.kind == "upload"
    assert verdict.text == "A round takes 1 s: transfer-bound: upload 48 %, download 48 % of its critical path."
    more = judge(run({f"c{i}": {**even, "download": 0.6} for i in range(5)}, aggregate=0.0))
    assert (more.kind, "download-bound" in more.text) == ("download", True)


def test_two_slow_clients_of_ten_are_stragglers_if_both_stand_out():
    usual = {f"c{i}": {"compute": 2.0, "upload": 0.5} for i in range(8)}
    slow = {"compute": 2.0, "upload": 6.0}
    verdict = judge(run({**usual, "c8": slow, "c9": slow}))
    assert (verdict.kind, set(verdict.stragglers), verdict.bound_by) == ("straggler", {"c8", "c9"}, "upload")
    assert verdict.without == pytest.approx(3.0)
    third = judge(run({**usual, "c7": slow, "c8": slow, "c9": slow}))
    assert (third.kind, third.stragglers) == ("upload", ())
    of_four = {"c0": usual["c0"], "c1": usual["c1"], "c2": slow, "c3": slow}
    assert judge(run(of_four)).stragglers == (), "half of all are a kind of device"


def flying(number):
    """A round of 2 s in which journeys end that began long before: mostly computing, sent at last."""
    ends = 2.0 * (number + 1)
    ways = [
        journey(f"c{4 * number + i}", number, ends - 10.0 - i, ends, download=1.0, compute=7.0 + i, upload=2.0)
        for i in range(4)
    ]
    return [whole(2.0, number, ends - 2.0, clock="virtual"), server(2.0, number, ends - 2.0, wait=2.0), *ways]


def test_asynchronous_rounds_are_bound_by_whole_journeys_and_nobody_holds_them_up():
    times = timeline([one for number in range(5) for one in flying(number)])
    verdict = judge(times)
    assert (verdict.kind, verdict.stragglers) == ("compute", ())
    assert verdict.share == pytest.approx(sum((7 + i) / (10 + i) for i in range(4)) / 4)
    assert stragglers(times) == []
    path = critical_path(times[0])
    assert (path.slowest, path.part) == (None, "compute")
    assert sum(link.seconds for link in path.links) == pytest.approx(2.0)
    assert path.text == "round 0 took 2 s: 4 updates came in, of 11.5 s in the median, 74 % of that compute"


def test_stragglers_by_name_with_their_history():
    def ways(number):
        slow = "c2" if number % 3 else "c1"
        return {f"c{i}": {"compute": 1.0, "upload": 3.0 if f"c{i}" == slow else 0.5} for i in range(4)}

    first, second = stragglers(run(ways, rounds=6))
    assert (first.node, first.determined, first.rounds, first.part) == ("c2", 4, 6, "upload")
    assert first.seconds_lost == pytest.approx(4 * 2.5)
    assert (first.typical, first.peers) == (pytest.approx(4.0), pytest.approx(1.5))
    assert [turn.determined for turn in first.history] == [False, True, True, False, True, True]
    assert (second.node, second.determined) == ("c1", 2)
    assert [one.node for one in stragglers(run(ways), most=1)] == ["c2"]


def test_the_last_of_equals_is_no_straggler():
    assert stragglers(run({f"c{i}": {"compute": 1.0, "upload": 0.5} for i in range(4)})) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1234.5, "20 min 34 s"), (8.12, "8.12 s"), (0.243, "243 ms"), (0.0031, "3.1 ms"), (0.0, "0 s")],
)
def test_lengths_of_time_as_people_write_them(seconds, words):
    assert format_seconds(seconds) == words
