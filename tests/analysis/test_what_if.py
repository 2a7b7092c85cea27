# SPDX-License-Identifier: Apache-2.0
"""What other settings would have given: against the arithmetic by hand, and against re-runs in the lab."""

import itertools

import msgspec
import numpy as np
import pytest

from fedvitals import lab
from fedvitals.analysis.bottleneck import judge
from fedvitals.analysis.remedies import remedies, resolve_change
from fedvitals.analysis.sampling import expected_longest
from fedvitals.analysis.timeline import rounds_of_clock, timeline
from fedvitals.analysis.what_if import latencies, what_if
from fedvitals.lab.experiment import read
from fedvitals.lab.network.profiles import Device, Link
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Run, Span, Transfer, Where
from fedvitals.testing import MemorySink
from fedvitals.views.profile import latency_of
from support.conditions import holds_for_each
from support.spans_by_hand import in_turn, journey, server, side_by_side, whole


def run(ways, rounds=4, **more):
    spans, at = [], 0.0
    for number in range(rounds):
        made = side_by_side(ways(number) if callable(ways) else ways, number, at, **more)
        spans += made
        at += made[0].seconds
    return timeline(spans)


def rows_of(times, **more):
    return {next(iter(row.key.items())): row for row in what_if(times, **more)}


TEN = {f"c{i}": {"download": 0.5, "data": 1.0, "compute": 1.0, "upload": 1.0 + i} for i in range(10)}


def test_work_that_shrinks():
    rows = rows_of(run(TEN))
    assert holds_for_each(row.before == pytest.approx(13.0) for row in rows.values())
    assert rows["compress", 4].after == pytest.approx(13.0 - 7.5)
    assert rows["compress", 16].after == pytest.approx(13.0 - 10 * 15 / 16)
    assert rows["compress_download", 4].after == pytest.approx(13.0 - 0.375)
    assert rows["steps", 0.5].after == pytest.approx(12.0)
    assert rows["loading_workers", 4].after == pytest.approx(12.25)
    assert rows["aggregate", 4].after == pytest.approx(13.0 - 0.375)
    assert ("batch", 2) not in rows
    assert "cannot be told" in rows["compress", 4].assumes
    assert rows["compress", 4].share == pytest.approx(7.5 / 13)


def test_latency_stays_where_it_is_known():
    known = rows_of(run(TEN), latency={"c9": 2.0})["compress", 4]
    assert known.after == pytest.approx(13.0 - 8.0 * 0.75)  # 2 of c9's 10 seconds do not shrink
    assert "stays as it is" in known.assumes
    told = [
        Transfer(Where("r", 0, "c9"), 0.0, "c9", "server", size, size, 2.0 + size / 1000) for size in (1000, 8000, 8000)
    ]
    assert latencies(told) == {"c9": pytest.approx(2.0)}
    assert latencies(told[1:]) == {}  # of one size
    down = [
        Transfer(Where("r", 0, "c9"), 0.0, "server", "c9", size, size, 3.0 + size / 500, "model") for size in (100, 900)
    ]
    assert latencies(down) == {"c9": pytest.approx(3.0)}


def test_what_latency_takes_part_in_is_a_gain_of_up_to():
    times = run(TEN)
    unknown, known = rows_of(times), rows_of(times, latency=dict.fromkeys(TEN, 0.5))
    assert unknown["compress", 4].at_most
    assert unknown["compress_download", 4].at_most
    assert not known["compress", 4].at_most
    assert known["compress_download", 4].share == pytest.approx(0.0)  # all of 0.5 s is latency
    gains = {next(iter(one.key.items())): one.at_most for one in remedies(judge(times), what_if(times))}
    assert gains["compress", 4]
    assert not gains["steps", 0.5]


def test_a_few_clients_lose_what_they_lose_and_rows_are_told_once():
    three = {f"c{i}": {"compute": 1.0 + i} for i in range(3)}
    rows = what_if(run(three))
    (half,) = [row for row in rows if "cohort" in row.key]
    assert half.lost == pytest.approx(1 / 3)  # 2 of 3 are left
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert sum("over_select" in row.key for row in rows) == 1


def test_one_round_is_followed_for_long_enough_to_tell_an_asynchronous_pace():
    """The first landings alone are another pace than the usual one."""
    each = [1.0] * 6 + [10.0] * 2
    ways = {f"c{i}": {"compute": seconds} for i, seconds in enumerate(each)}
    (one,), (many,) = (
        [row.after for row in what_if(run(ways, rounds=rounds, aggregate=0.0)) if "asynchronous" in row.key]
        for rounds in (1, 5)
    )
    assert one == pytest.approx(many, rel=0.1)


def test_a_warm_up_is_no_part_of_what_would_have_been():
    spans = [s for n in range(4) for s in in_turn({"c1": 50.0 if n == 0 else 1.0, "c2": 1.0}, n, 100.0 * n)]
    assert rows_of(timeline(spans))["steps", 0.5].before == pytest.approx(2.0)


def test_deadlines_who_is_cut_and_what_is_lost():
    samples = {f"c{i}": 100.0 if i else 1100.0 for i in range(10)}
    rows = [row for row in what_if(run(TEN, samples=samples)) if "deadline" in row.key]
    assert [round(row.key["deadline"], 3) for row in rows] == [7.5, 10.5, 11.5]
    by_hand = rows[2]
    assert by_hand.after == pytest.approx(12.0, abs=1e-3)
    assert by_hand.cut == ("c9",)
    assert (by_hand.lost, by_hand.lost_of) == (pytest.approx(100 / 2000), "samples")
    assert rows[0].cut == ("c5", "c6", "c7", "c8", "c9")
    unknown = next(row for row in what_if(run(TEN)) if "deadline" in row.key)
    assert (unknown.lost, unknown.lost_of) == (pytest.approx(0.5), "clients")


def test_a_single_client_has_no_deadline_and_nobody_to_ask_instead():
    """The model of `fv.watch` is the only client: whoever waits, waits for it."""
    alone = run(lambda number: {"model": {"compute": 1.0 + number}})
    assert not {"deadline", "over_select", "asynchronous", "cohort"} & {name for name, _ in rows_of(alone)}


def test_smaller_cohorts_by_order_statistics():
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    for count in range(1, 6):
        mean = np.mean([max(chosen) for chosen in itertools.combinations(values, count)])
        assert expected_longest(values, count) == pytest.approx(mean)
    ends = np.array([3.5 + i for i in range(10)])
    assert rows_of(run(TEN))["cohort", 0.5].after == pytest.approx(expected_longest(ends, 5) + 0.5)


def test_over_selection_with_and_without_clients_to_spare():
    rows = rows_of(run(TEN))
    assert rows["over_select", 1.3].name == "10 clients asked, the first 8 taken"
    assert rows["over_select", 1.3].after == pytest.approx(10.5 + 0.5)

    def some(number):
        return {f"c{(3 * number + i) % 10}": TEN[f"c{(3 * number + i) % 10}"] for i in range(5)}

    spare = rows_of(run(some, rounds=20))["over_select", 1.5]
    assert spare.name == "8 clients asked, the first 5 taken"
    exact = np.mean([sorted(chosen)[4] for chosen in itertools.combinations([3.5 + i for i in range(10)], 8)])
    assert spare.after == pytest.approx(exact + 0.5, rel=0.03)


def test_over_selection_when_somebody_was_away():
    """Who was asked and not there is no client to spare: all ten were asked, so fewer are needed."""
    times = run(lambda number: TEN if number else {**TEN, "c0": {"away": 12.5}})
    row = rows_of(times)["over_select", 1.3]
    assert row.name == "10 clients asked, the first 8 taken"
    assert row.key["all_asked"]
    assert row.after == pytest.approx(np.mean([11.5 + 0.5, *[10.5 + 0.5] * (len(times) - 1)]))


def test_asynchronous_lands_as_often_as_all_clients_together_do():
    each = [0.7 + i / 60 if i < 36 else 10.0 for i in range(40)]
    ways = {f"c{i}": {"compute": seconds} for i, seconds in enumerate(each)}
    row = rows_of(run(ways, rounds=60, aggregate=0.0))["asynchronous", 10]
    steady = 40 / sum(1 / seconds for seconds in each)
    assert row.before == pytest.approx(10.0)
    assert steady <= row.after < 1.2 * steady  # who has landed rests until the buffer is full
    grouped = dict.fromkeys(ways, "edge-0")
    assert not any("asynchronous" in row.key for row in what_if(run(ways, groups=grouped)))


def test_what_takes_turns_has_no_deadline_but_fewer_clients_and_larger_batches():
    shares = {"data": 0.25, "forward": 0.25, "backward": 0.25, "optimizer": 0.25}
    spans = in_turn({f"c{i}": 1.0 for i in range(8)}, gap=0.25, after=0.5, shares=shares)
    rows = rows_of(timeline(spans))
    assert rows["cohort", 0.5].after == pytest.approx(10.5 / 2, abs=0.5)
    assert rows["batch", 2].after == pytest.approx(10.5 - 8 * 0.125)
    assert rows["loading_workers", 4].after == pytest.approx(10.5 - 8 * 0.75 * 0.25)
    assert not {"deadline", "over_select", "asynchronous"} & {name for name, _ in rows}


def test_evaluation_as_often_as_it_was():
    spans = []
    for number in range(10):
        tested = 2.0 if number % 2 else 0.0
        spans += [
            whole(2.0 + tested, number, 4.0 * number, clock="virtual"),
            server(2.0 + tested, number, 4.0 * number, wait=2.0, evaluate=tested),
            journey("c1", number, 4.0 * number, 4.0 * number + 2.0 + tested, compute=2.0),
        ]
    rows = rows_of(timeline(spans))
    assert rows["evaluate_every", 5].after == pytest.approx(3.0 - 0.6)  # 2 evaluations in place of 5
    assert rows["evaluate_every", 0].after == pytest.approx(2.0)


def test_nothing_to_ask_of_nothing():
    assert what_if([]) == []
    assert what_if(timeline([whole(3.0)])) == []


def test_remedies_are_ranked_by_gain_and_price_and_say_what_they_are_against():
    times = run(TEN)
    verdict = judge(times)
    found = remedies(verdict, what_if(times))
    assert verdict.kind == "upload"
    assert [next(iter(one.key)) for one in found][:3] == ["compress", "compress", "asynchronous"]
    assert "cohort" in found[-1].key  # half of the clients is more than anybody would give up first
    assert found[0].key == {"compress": 16}
    assert found[0].why == "The run is upload-bound."
    assert found[0].change == {"compression": {"kind": "top_k", "share": 0.03125}}
    assert sum("deadline" in one.key for one in found) == 1
    assert holds_for_each(one.share >= 0.02 for one in found)
    assert remedies(verdict, what_if(times), least=0.99) == []
    half = [row for row in what_if(times) if "cohort" in row.key]
    assert half[0].share > 0.02
    assert remedies(verdict, half) == []  # what leaves out half of the data is no advice by itself


def test_who_holds_up_the_run_is_named_among_the_remedies():
    times = run({**{f"c{i}": {"compute": 1.0} for i in range(12)}, "c3": {"compute": 9.0}})
    found = {next(iter(one.key)): one for one in remedies(judge(times), what_if(times))}
    assert found["without"].key == {"without": ["c3"]}
    assert found["without"].after == pytest.approx(1.5)
    assert found["deadline"].after == pytest.approx(1.5, abs=1e-3)
    assert found["deadline"].costs == "8 % of the clients would not count, those of c3 in most rounds."


def test_changes_are_worked_out_from_the_experiment():
    change = {"local.epochs": {"times": 0.5}, "local.iterations": {"times": 0.5}, "participation": {"times": 0.5}}
    table = {"local": {"epochs": None, "iterations": 5}, "participation": 1.0}
    assert resolve_change(change, table) == {"local.iterations": 2, "participation": 0.5}
    assert resolve_change({"network.deadline_seconds": 3.5}, {}) == {"network.deadline_seconds": 3.5}


# -- the lab, again with the change -----------------------------------------------------------------------------------

DEVICE = Device(2e7, 2**30)
PLANTED = {
    "upload": lab.Network(
        links="l", devices="d", profiles={"l": Link(100e6, 2e5), "d": DEVICE}, spread=0.2, jitter=0.1
    ),
    "compute": lab.Network(
        links="l", devices="d", profiles={"l": Link(1e9, 1e9), "d": Device(1e6, 2**30)}, spread=0.2, jitter=0.1
    ),
    "straggler": lab.Network(
        links="l",
        devices="d",
        profiles={"l": Link(10e6, 10e6), "d": DEVICE, "s": Link(10e6, 5e4)},
        overrides={"c3": ["s"]},
        jitter=0.1,
    ),
}


def timed(e):
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True, detectors=[]) as monitor:
        lab.run(e, monitor)
    return rounds_of_clock(timeline(record for record in sink.records if isinstance(record, Span)), "virtual")


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_predicted_gains_come_true_in_the_lab(name):
    """Every remedy that the lab can run, but the smaller cohort: who is drawn in a few rounds is luck."""
    quick = lab.Evaluation(every=100, local=False)
    local = lab.Local(iterations=4)
    e = lab.Experiment(clients=12, rounds=6, network=PLANTED[name], model="mlp", local=local, evaluation=quick)
    times = timed(e)
    verdict = judge(times)
    assert verdict.kind == name
    tried = 0
    for remedy in remedies(verdict, what_if(times), least=0.05):
        if remedy.change is None or "cohort" in remedy.key or "network.server" in remedy.change:
            continue
        changed = read(e.to_toml(), resolve_change(remedy.change, msgspec.to_builtins(e)))
        changed = msgspec.structs.replace(changed, rounds=round(e.rounds * remedy.rounds_factor))
        seconds = float(np.mean([time.seconds for time in timed(changed)])) * remedy.rounds_factor
        assert remedy.saving == pytest.approx(remedy.before - seconds, rel=0.15), remedy
        tried += 1
    assert tried >= 3


@pytest.mark.thorough
def test_latency_of_the_labs_links_is_no_gain_of_compression():
    """4g takes 85 ms one way: of a small model's upload, most. It was once computed that compressing saves half."""
    network = lab.Network(links="4g", devices="laptop", jitter=0.1, spread=0.1)
    quick = lab.Evaluation(every=100, local=False)
    e = lab.Experiment(clients=8, rounds=4, network=network, model=lab.mlp(hidden=[64]), evaluation=quick)
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True, detectors=[]) as monitor:
        lab.run(e, monitor)
    times = rounds_of_clock(timeline(record for record in sink.records if isinstance(record, Span)), "virtual")
    transfers = [record for record in sink.records if isinstance(record, Transfer)]
    kept = Run("r", "r", host="lab", config={"experiment": e.to_toml()})
    latency = latency_of(kept, times, transfers)
    assert latency == pytest.approx({f"c{i}": 0.085 for i in range(8)})
    assert latency_of(Run("r", "r", host="lab", config={"experiment": "network = 3"}), times, transfers) is None
    assert latency_of(Run("r", "r"), times, transfers) is None
    row = rows_of(times, latency=latency)["compress", 4]
    again = float(np.mean([time.seconds for time in timed(read(e.to_toml(), {"compression": {"kind": "int8"}}))]))
    assert row.after == pytest.approx(again, rel=0.02)
    assert row.share < 0.15
    assert rows_of(times)["compress", 4].share > 2 * row.share, "which is why it is told as «up to»"
