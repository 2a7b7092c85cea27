# SPDX-License-Identifier: Apache-2.0
"""Conditions as people say them, over a run of the lab in which something happens in each round."""

import math
import re
from collections.abc import Iterator

import pytest

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.protocols import History
from fedvitals.records import Finding, Metric, Where
from fedvitals.replay.debugger.breakpoints import Breakpoints, Hit
from fedvitals.replay.debugger.cached_history import CachedHistory
from fedvitals.replay.debugger.conditions import EXAMPLES, parse, parse_quantity
from fedvitals.store import MemoryStore, open_reader
from fedvitals.store.read.queries import records

Run = tuple[History, list[Finding]]


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """c1 crashes in round 2, c3 shouts in round 3, c5 has NaN in round 4: from then on everybody has."""
    store = tmp_path_factory.mktemp("conditions") / "runs.db"
    faults = [
        lab.crash(nodes=["c1"], since=2, until=2),
        lab.scaling(nodes=["c3"], factor=20.0, since=3, until=3),
        lab.not_finite(nodes=["c5"], since=4, until=4),
    ]
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=6, rounds=6, faults=faults)
    with fv.Monitor(store, run="ill", host="lab", strict=True) as monitor:
        lab.run(experiment, monitor, workers=1)
    with open_reader(store) as reader:
        yield reader.history(monitor.run.id), list(records(reader, monitor.run.id, Finding))


def rounds_that_hold(run: Run, text: str) -> dict[int, str]:
    """What a condition says, by the rounds in which it holds."""
    history, findings = run
    condition = parse(text)
    said = {number: condition.holds(history, findings, number) for number in history.rounds()}
    return {number: sentence for number, sentence in said.items() if sentence is not None}


def series(**values: list[float]) -> History:
    """A run of which only this was measured: «c7» of `update.norm`, and «whole» of `accuracy`."""
    store = MemoryStore()
    for node, numbers in values.items():
        for round_, value in enumerate(numbers):
            whole = node == "whole"
            where = Where("r", round_, None if whole else node)
            store.write([Metric(where, float(round_), "accuracy" if whole else "update.norm", value)])
    return store.history("r")


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_is_understood_and_reads_back(text: str) -> None:
    condition = parse(text)
    assert parse(str(condition)) == condition
    assert str(condition) == condition.text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ANY nan", "any NaN"),
        ("nan of c7", "NaN in c7"),
        ("a non-finite value", "any NaN or infinity"),
        ("update.norm of c7 > 5x its median", "update.norm of c7 > 5 × its median"),
        ("update.norm of c7 > 5*its median.", "update.norm of c7 > 5 × its median"),
        ("c7's update.norm exceeds 5 times its median", "update.norm of c7 > 5 × its median"),
        ("c7’s update norm is over 500 % of its median", "update.norm of c7 > 5 × its median"),  # noqa: RUF001
        ("update.norm of every client > 5 × its average", "update.norm of any client > 5 × its mean"),
        ("update.norm > 3 x the cohort's median", "update.norm > 3 × the others' median"),
        ('update.norm of "site a" ≥ 3', 'update.norm of "site a" >= 3'),
        ("update.norm of conv1 in c7 > 1", "update.norm of layer conv1 in c7 > 1"),
        ("«accuracy falls below 50%»", "accuracy < 0.5"),
        ("accuracy at least 0.123456789", "accuracy >= 0.123456789"),
        ("accuracy falls by more than 3 percentage points in 5 rounds", "accuracy drops by 3 points in 5 rounds"),
        ("accuracy drops by 0.03 from its best", "accuracy drops by 0.03 from its best"),
        ("loss grows by 20%", "loss rises by 20 %"),
        ("loss becomes NaN", "loss is NaN"),
        ("finding label flip in c7", "finding LABEL_FLIP of c7"),
        ("a critical finding", "critical finding"),
        ("failure of c2", "any failure of c2"),
        ("after round 3 AND accuracy < .5", "round > 3 and accuracy < 0.5"),
        ("user.F1 < 0.5", "user.F1 < 0.5"),
    ],
)
def test_people_say_the_same_in_many_ways(text: str, meant: str) -> None:
    assert str(parse(text)) == meant
    assert parse(meant) == parse(text)


@pytest.mark.parametrize(
    ("text", "taught"),
    [
        ("", "«any NaN»"),
        ("hello", "«accuracy drops by 3 points»"),
        ("acuracy < 0.5", "Did you mean 'accuracy'"),
        ("f1 < 0.5", "'user.f1'"),
        ("accuracy < 50", "50 %, or 0.5"),
        ("accuracy drops by 3", "3 points, or 0.03"),
        ("loss drops by 3 points", "per cent"),
        ("loss drops by 0", "over 0"),
        ("time.round > 50 %", "of its median"),
        ("accuracy >", "compares with nothing"),
        ("loss > 1e999", "more than a number can be"),
        ("finding BYZANTIN", "Did you mean 'BYZANTINE'"),
        ("gradient.l2 of c7 > 3", "gradient.l2 of layer conv1 in c7"),
        ("gradient.l3 of layer conv1 > 3", "Known: absmax"),
        ("gradients.l2 of layer conv1 > 3", "Did you mean 'gradient'"),
        ("x" * 501, "501 characters"),
    ],
)
def test_what_is_not_understood_is_answered_with_what_would_be(text: str, taught: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert taught in str(refused.value)


def test_nan_is_found_where_it_was_made(ill: Run) -> None:
    said = rounds_that_hold(ill, "any NaN")
    assert [*said] == [4, 5]
    assert said[4].startswith("gradient of dense1.weight in c5 has NaN: ")
    assert said[5].startswith("gradient of dense1.weight in c0 has NaN: ")
    assert 4 in rounds_that_hold(ill, "NaN in c5")
    assert [*rounds_that_hold(ill, "NaN in c4")] == [5]
    assert rounds_that_hold(ill, "any infinity") == {}
    assert [*rounds_that_hold(ill, "loss is NaN")] == [4, 5]


def test_a_norm_against_its_own_past_and_against_the_others(ill: Run) -> None:
    assert [*rounds_that_hold(ill, "update.norm of c3 > 5 × its median")] == [3]
    assert rounds_that_hold(ill, "update.norm > 5 × its median") == rounds_that_hold(
        ill, "update.norm of c3 > 5 × its median"
    )
    assert [*rounds_that_hold(ill, "update.norm of c3 > 5 × the cohort's median")] == [3]
    assert rounds_that_hold(ill, "update.norm of c2 > 5 × the cohort's median") == {}
    said = rounds_that_hold(ill, "update.norm of layer dense1 in c3 > 5 × its mean")
    assert [*said] == [3]
    assert said[3].startswith("update.norm of dense1.weight in c3 is ")


def test_the_federations_own_accuracy_and_loss(ill: Run) -> None:
    assert [*rounds_that_hold(ill, "accuracy < 0.27")] == [0, 4, 5]
    assert [*rounds_that_hold(ill, "accuracy < 27 % and round > 0")] == [4, 5]
    drops = rounds_that_hold(ill, "accuracy drops by 3 points")
    assert [*drops] == [3, 4]
    assert re.fullmatch(r"accuracy drops by 6\.\d+ points, from 0\.4\d+ in round 2 to 0\.4\d+", drops[3])
    assert [*rounds_that_hold(ill, "accuracy drops by 3 points from its best")] == [3, 4, 5]
    assert [*rounds_that_hold(ill, "loss < 2.1")] == [3]  # and NaN is under nothing


def test_findings_events_and_rounds(ill: Run) -> None:
    assert [*rounds_that_hold(ill, "finding BYZANTINE")] == [3]
    assert rounds_that_hold(ill, "finding byzantine of c2") == {}
    assert "sends what it trained scaled by" in rounds_that_hold(ill, "any finding of c3")[3]
    assert [*rounds_that_hold(ill, "event client.failed of c1")] == [*rounds_that_hold(ill, "any failure")] == [2]
    assert rounds_that_hold(ill, "event client.failed of c2") == {}
    assert [*rounds_that_hold(ill, "round 4")] == [4]


def test_the_median_is_of_the_earlier_rounds_that_are_finite() -> None:
    history = series(c7=[1.0, math.nan, 3.0, 12.0, 12.0])
    condition = parse("update.norm of c7 > 5 × its median")
    assert condition.holds(history, (), 0) is None  # nothing to compare with
    assert condition.holds(history, (), 3) == "update.norm of c7 is 12, over 5 × its median 2"
    assert condition.holds(history, (), 4) is None  # the median is 3 now
    assert condition.holds(history, (), 5) is None  # it was not measured


def test_a_drop_is_counted_from_the_last_time_it_was_measured() -> None:
    history = series(whole=[0.5, 0.53, 0.52, 0.51, 0.50])
    rounds = range(5)
    by_step = [parse("accuracy drops by 3 points").holds(history, (), r) for r in rounds]
    in_three = [parse("accuracy drops by 3 points in 3 rounds").holds(history, (), r) for r in rounds]
    assert by_step == [None] * 5
    assert in_three == [None] * 4 + ["accuracy drops by 3 points, from 0.53 in round 1 to 0.5"]


def test_where_only_clients_told_it_their_median_is_the_federations() -> None:
    store = MemoryStore()
    for node, value in (("c1", 0.2), ("c2", 0.6), ("c3", 0.7)):
        store.write([Metric(Where("r", 0, node), 0.0, "accuracy", value)])
    history = store.history("r")
    assert parse("accuracy < 0.5").holds(history, (), 0) is None
    assert parse("accuracy of any client < 0.5").holds(history, (), 0) == "accuracy of c1 is 0.2, under 0.5"
    assert parse("accuracy > 0.5").holds(history, (), 0) == "accuracy (median of the clients) is 0.6, over 0.5"


def test_points_are_numbered_counted_and_removed(ill: Run) -> None:
    history, findings = ill
    points = Breakpoints("round 2", "accuracy < 0.3")
    points.remove(1)
    assert points.add("finding CRASH") == 3  # a number is not given again
    assert [hit.number for hit in points.check(history, findings, 2)] == [3]
    assert points.check(history, findings, 2, but={3}) == []
    assert [str(point) for point in points] == ["2: break accuracy < 0.3", "3: break finding CRASH, hit 1 time"]
    with pytest.raises(ConfigError, match="There are: 2, 3"):
        points.remove(1)


def test_names_that_a_finished_run_does_not_have_are_refused(ill: Run) -> None:
    history, _ = ill
    points = Breakpoints()
    for text, taught in (
        ("update.norm of c77 > 3", "Unknown node 'c77'"),
        ("NaN in c77", "Unknown node"),
        ("finding BYZANTINE of c77", "Unknown node"),
        ("update.norm of dense1 > 3", "«update.norm of layer dense1»"),
        ("update.norm of layer conv1 in c3 > 3", "Known: dense1.bias"),
    ):
        with pytest.raises(ConfigError, match=taught):
            points.add(text, history)
    assert len(points) == 0


def test_run_until_finds_the_first_round(ill: Run) -> None:
    history, findings = ill
    points = Breakpoints("finding BYZANTINE", "round 5")
    points.watch("accuracy")  # tells, and does not stop
    hit = points.first(history, findings, range(6))
    assert hit is not None
    assert (hit.number, hit.round, hit.stops) == (1, 3, True)
    assert str(hit).startswith("Breakpoint 1, round 3: finding BYZANTINE of c3")
    assert points.first(history, findings, range(4, 6)) == Hit(2, 5, "round 5", "it is round 5")
    assert points.first(history, findings, range(4, 5)) is None


def test_a_watchpoint_tells_of_changes_alone(ill: Run) -> None:
    history, findings = ill
    points = Breakpoints()
    points.watch("accuracy")
    points.watch("NaN in c5")
    hits = [hit for number in history.rounds() for hit in points.check(history, findings, number)]
    assert not any(hit.stops for hit in hits)
    assert [hit.round for hit in hits if hit.number == 1] == [0, 1, 2, 3, 4]  # in round 5 as in round 4
    assert re.fullmatch(r"accuracy is 0\.3\d+, was 0\.2\d+ in round 0", hits[1].reason)
    assert [hit.round for hit in hits if hit.number == 2] == [4]
    with pytest.raises(ConfigError, match="names no metric"):
        points.watch("something or other happens")


def test_a_remembered_history_gives_the_same_answers(ill: Run) -> None:
    history, findings = ill
    known = CachedHistory(history)
    for text in ("any NaN", "any failure", "update.norm > 5 × its median", "update.norm of layer dense1 > 3"):
        assert rounds_that_hold((known, findings), text) == rounds_that_hold(ill, text)
    assert [e.name for e in known.events(None, 2)] == [e.name for e in history.events(None, 2)]


def test_a_quantity_knows_how_it_is_written() -> None:
    assert str(parse_quantity("weight norm of any client")) == "weight.norm of any client"
    with pytest.raises(ConfigError, match="names no metric"):
        parse_quantity("5 of c7")
