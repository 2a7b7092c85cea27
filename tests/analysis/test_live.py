# SPDX-License-Identifier: Apache-2.0
"""Shares of a round's bottlenecks while a run goes on, and the note that a detector makes of them."""

import math

import pytest

from fedvitals import catalog
from fedvitals.analysis.bottleneck import judge_round
from fedvitals.analysis.live import LiveProfile
from fedvitals.analysis.timeline import rounds_of_clock, timeline
from fedvitals.diagnosis.cases import cases, is_trouble
from fedvitals.diagnosis.detectors.system import bottleneck
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Metric, Span, Where
from fedvitals.store.in_memory import MemoryStore
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.spans_by_hand import in_turn, journey, server, side_by_side, span, whole


def emitted(*rounds):
    """What is emitted for rounds given by their Spans."""
    found = []
    live = LiveProfile(found.append)
    for number, spans in enumerate(rounds):
        live.write([*spans, Metric(Where("r", number), 5.0, "time.round", 0.1)])
    return found


def shares(metrics):
    return {m.name.removeprefix("bottleneck."): m.value for m in metrics if m.name.startswith("bottleneck.")}


EVEN = {"download": 0.5, "data": 0.5, "compute": 1.0, "upload": 0.5}
SLOW = {f"c{i}": {**EVEN, "upload": 6.0 if i == 3 else 0.5} for i in range(8)}
ROUNDS = {
    "upload": side_by_side({f"c{i}": {**EVEN, "upload": 4.0 + i / 10} for i in range(8)}),
    "straggler": side_by_side(SLOW),
    "aggregation": side_by_side({f"c{i}": EVEN for i in range(8)}, aggregate=4.0),
    "turns": in_turn({f"c{i}": 1.0 + i / 10 for i in range(6)}, gap=0.1),
    "server": [
        *in_turn({"c1": 1.0, "c2": 1.0, "c3": 1.0}, after=5.0),
        server(8.0, clock="real", folded=True, wait=3.0, receive=1.0, aggregate=0.5, evaluate=3.0),
    ],
    "workers": [
        whole(4.0),
        *(
            span(f"c{i}", "client", float(i // 4), 1.0, parts={"forward": 0.8, "data": 0.2}, folded=True)
            for i in range(16)
        ),
    ],
    "pair": side_by_side({f"c{i}": {**EVEN, "upload": 6.0 if i in (3, 5) else 0.5} for i in range(8)}),
    "uneven": [
        whole(8.0),
        *(span(f"c{i}", "client", 0.0, 8.0 if i == 3 else 1.0 + i / 10, parts={"forward": 9.0}) for i in range(6)),
    ],
    "flying": [
        whole(2.0, clock="virtual"),
        *(journey(f"c{i}", began=-8.0 - i, ends=2.0, compute=7.0 + i, upload=3.0) for i in range(4)),
    ],
    "line": [
        whole(6.0, clock="virtual"),
        *(journey(f"c{i}", ends=6.0, queue=float(i), download=1.0, compute=1.0) for i in range(5)),
    ],
}


@pytest.mark.parametrize("name", ROUNDS)
def test_live_shares_are_those_of_the_verdict(name):
    (time,) = timeline(ROUNDS[name])
    verdict = judge_round(time)
    found = shares(emitted(ROUNDS[name]))
    for kind in ("compute", "upload", "download", "aggregation", "server"):
        assert found[kind] == pytest.approx(verdict.shares.get(kind, 0.0), abs=0.02), kind
    assert found["data_loading"] == pytest.approx(verdict.shares.get("data loading", 0.0), abs=0.02)
    if verdict.kind == "straggler":
        assert found["straggler"] == pytest.approx(verdict.share, abs=0.01)
    else:
        assert found["straggler"] < 1 / 3


def test_a_batch_that_is_delivered_twice_counts_once():
    found = []
    live = LiveProfile(found.append)
    spans = ROUNDS["turns"]
    live.write(spans)
    live.write(spans)
    live.write([Metric(Where("r", 0), 5.0, "time.round", 0.1)])
    assert shares(found) == shares(emitted(spans))


def test_no_client_tells_of_the_round_or_of_the_server():
    lies = [
        span("c1", "round", 0.0, 600.0, own="lie", clock="virtual"),
        span("c1", "server", 0.0, 600.0, clock="virtual", parts={"aggregate": 600.0}),
    ]
    assert shares(emitted([*ROUNDS["upload"], *lies])) == shares(emitted(ROUNDS["upload"]))


def test_the_client_that_was_waited_for_is_named():
    (metric,) = [m for m in emitted(side_by_side(SLOW)) if m.name == "time.critical"]
    assert (metric.where.node, metric.value) == ("c3", pytest.approx(8.0))
    assert holds_for_each(m.name in {measure.name for measure in catalog.MEASURES} for m in emitted(side_by_side(SLOW)))


def test_the_virtual_clock_comes_first_and_rounds_do_not_mix():
    both = [*in_turn({"c1": 0.1, "c2": 0.1}), *side_by_side(SLOW)]
    first, second = both, side_by_side({f"c{i}": EVEN for i in range(8)}, number=1)
    found = emitted(first, second)
    by_round = [shares([m for m in found if m.where.round == number]) for number in (0, 1)]
    assert by_round[0]["upload"] == pytest.approx(6.0 / 8.5)
    assert by_round[1]["upload"] == pytest.approx(0.5 / 3.0)
    assert by_round[1]["straggler"] == 0


def test_who_began_before_the_round_is_no_straggler():
    ways = [journey(f"c{i}", began=-4.0, ends=2.0, compute=3.0 + i, upload=0.5) for i in range(4)]
    assert shares(emitted([whole(2.0, clock="virtual"), *ways]))["straggler"] == 0


def test_lies_are_held_to_what_can_be_and_memory_is_bounded():
    bad = [
        span("c1", "client", 0.0, math.nan, parts={"forward": 1.0}),
        span("c2", "client", 0.0, 2.0, parts={"forward": 1e308, "backward": 1e308}),
        span("c3", "client", 0.0, 2.0, parts={"forward": 1e200}, stacked=-1),
        span("c3", "client", 0.0, 2.0, parts={"forward": 1e200}, stacked=-1, own="again"),
        span("server", "server", 0.0, 9.0, parts={"aggregate": 1e307}),
        whole(4.0),
    ]
    found = emitted(bad)
    assert holds_for_each(0 <= m.value <= 1 for m in found if m.name.startswith("bottleneck."))
    live = LiveProfile(found.append)
    for number in range(1000):  # rounds that never close
        live.write([span(f"c{i}", "client", 0.0, 1.0, number) for i in range(3)])
    assert len(live._open) == 8
    many = [span(f"c{i}", "client", 0.0, 1.0 + i / 1e4, 5000) for i in range(10_000)]
    live.write([whole(3.0, 5000), *many])
    (sums,) = live._open["r", 5000].values()
    assert len(sums.clients.latest) == 64
    assert sums.clients.count == 10_000


def test_a_round_without_spans_says_nothing():
    assert emitted([], [span("c1", "client", 0.0, 1.0, 1)]) == []


def history(kinds, seconds=20.0):
    """A run whose rounds have these shares: one mapping for each round."""
    store = MemoryStore()
    records, names = [], ("straggler", "upload", "download", "data_loading", "aggregation", "server", "compute")
    for number, given in enumerate(kinds):
        where = Where("r", number)
        values = {f"bottleneck.{name}": given.get(name, 0.1) for name in names} | {"time.round": seconds}
        records += [
            Metric(where, 1.0, name, value, "s", 100 * number + i) for i, (name, value) in enumerate(values.items())
        ]
        records.append(Metric(Where("r", number, "c7"), 1.0, "time.critical", 3.0, "s", 100 * number + 99))
    store.write(records)
    return store.history("r")


def test_five_rounds_bound_by_the_same_are_a_note_in_one_case():
    found = examine(history([{"compute": 0.9}] * 3 + [{"upload": 0.7}] * 8), detectors=[bottleneck])
    assert {f.where.round for f in found} == {8, 9, 10}  # one round late
    assert {(f.issue, f.severity, f.evidence["since"]) for f in found} == {("BOTTLENECK", "note", 3)}
    assert found[0].message == "Of a round of 20 s, 70 % goes to sending updates to the server."
    (case,) = cases(found)
    assert not is_trouble(case)


def test_stragglers_come_first_and_are_named():
    found = examine(history([{"straggler": 0.6, "upload": 0.8}] * 6), detectors=[bottleneck])
    text = (
        "Of a round of 20 s, 60 % would be saved without waiting for the slowest clients, c7 in 5 of the last 5 rounds."
    )
    assert [f.message for f in found] == [text]


@pytest.mark.parametrize(
    ("kinds", "seconds"),
    [
        ([{"compute": 0.95}] * 12, 20.0),
        ([{"upload": 0.9}, {"download": 0.9}] * 6, 20.0),
        ([{"upload": 0.45}] * 12, 20.0),
        ([{"server": 0.9}] * 12, 0.05),
        ([{"upload": 0.9}] * 5, 20.0),
    ],
    ids=["computing", "now this, now that", "less than half", "short rounds", "too few rounds"],
)
def test_silent_where_there_is_nothing_to_say(kinds, seconds):
    assert examine(history(kinds, seconds), detectors=[bottleneck]) == []


@pytest.mark.thorough
def test_a_run_in_the_lab_told_as_it_goes_on():
    lab = pytest.importorskip("fedvitals.lab", reason="the lab needs torch")
    network = lab.Network(links="3g", devices="phone", overrides={"c2": ["lora"]}, spread=0.2, jitter=0.1)
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True, detectors=[]) as monitor:
        lab.run(lab.Experiment(clients=6, rounds=3, network=network, model="mlp"), monitor)
    found = []
    live = LiveProfile(found.append)
    for record in sink.records:  # one by one, as they came
        live.write([record])
    times = rounds_of_clock(timeline(record for record in sink.records if isinstance(record, Span)), "virtual")
    for time in times:
        verdict = judge_round(time)
        now = shares([m for m in found if m.where.round == time.round])
        assert verdict.kind == "straggler"
        assert now["straggler"] == pytest.approx(verdict.share, abs=0.01)
        assert now["upload"] == pytest.approx(verdict.shares["upload"], abs=0.01)
    assert {m.where.node for m in found if m.name == "time.critical"} == {"c2"}
