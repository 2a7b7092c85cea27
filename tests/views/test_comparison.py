# SPDX-License-Identifier: Apache-2.0
"""`fedvitals compare`: runs side by side, where they diverge, chance, and why."""

import random

import pytest

from fedvitals.cli.bars import SEVERAL, log_plot, shares_of
from fedvitals.lab import toml
from fedvitals.records import Finding, Metric, Where
from fedvitals.store import open_reader
from fedvitals.views.comparison.chance import change, pairing, student
from fedvitals.views.comparison.lab_defaults import DEFAULTS
from fedvitals.views.comparison.page import compare_page
from fedvitals.views.comparison.runs import compare, flattened, sides_of
from support.timed_run import STARTED, begin, stored
from support.verbs import result, run


def run_of(identity, name, *, seed=0, rate=0.1, compute=2.0, best=0.9, noise=0.0, started=STARTED, rounds=4, gsc=0.1):
    """Four rounds of three clients; the seed moves accuracy by up to `noise`."""
    chance = random.Random(seed)
    told = begin(identity, name, seed=seed, started=started, config={"experiment": f"[local]\nlr = {rate}\n"})
    for number in range(rounds):
        accuracy = best * (number + 1) / rounds + noise * chance.uniform(-1, 1)
        told.round({f"c{i}": (1.0, compute, 1.0) for i in range(3)}, accuracy=accuracy, loss=1 - accuracy)
        told.add(Metric(Where(identity, number, "c0"), told.at, "scale.gsc", gsc))
        told.add(Metric(Where(identity, number, "c0"), told.at, "memory.peak", 1e6 * compute))
    return told


def rows(comparison):
    return {row["name"]: row for row in comparison["rows"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two settings with five repeats each, told apart by learning rate and speed."""
    told = []
    for seed in range(5):
        told.append(run_of(f"slow-{seed}", "slow", seed=seed, noise=0.01, started=STARTED + seed))
        told.append(run_of(f"fast-{seed}", "fast", seed=seed, noise=0.01, rate=0.2, compute=1.0, best=0.7,
                           started=STARTED + 50 + seed, gsc=0.0))  # fmt: skip
    told[0].add(Finding(Where("slow-0", 1, "c1"), STARTED, "TIMEOUT", "warning", 0.9, "c1 is late."))
    return stored(tmp_path_factory.mktemp("compare") / "runs.db", *told)


def test_opens_with_accuracy_then_divergence_findings_time_and_memory(store, capsys):
    """In this order, before all numbers; the slow run's 4.5 s become 3.5 s. Who diverges, and where, is stated."""
    code, out, _ = run(capsys, "compare", "slow-0", "fast-0", "--store", store)
    assert code == 0
    order = ("Accuracy", "A and B diverge at round 0", "Findings", "Round (virtual clock)", "Peak memory", "learning",
             "Why")  # fmt: skip
    places = [out.index(words) for words in order]
    assert places == sorted(places)
    assert "Accuracy  89.5 % → 69.5 %  −20 points" in out
    assert "4.5 s → 3.5 s" in out
    assert "2 MB → 1 MB" in out
    assert "A: c1" in out


def test_a_difference_in_accuracy_is_drawn_in_points(store):
    with open_reader(store) as reader:
        page = compare_page(sides_of(reader, ["slow-0", "fast-0"]))
    accuracy, loss = page.differences
    assert (accuracy.name, accuracy.unit, loss.unit) == ("accuracy", "points", "")
    assert accuracy.lines[0].values[-1] == pytest.approx(-20, abs=3)


def test_opens_with_the_loss_where_no_accuracy_was_measured(tmp_path, capsys):
    """Of language models, for example; clients whose updates differ are named beside the round."""
    sides = [begin(identity, name) for identity, name in (("r1", "one"), ("r2", "two"))]
    for side, norm in zip(sides, (1.0, 3.0), strict=True):
        side.round({f"c{i}": (1.0, 2.0, 1.0) for i in range(3)}, loss=norm)
        side.add(Metric(Where(side.run.id, 0, "c1"), side.at, "update.norm", norm))
    _, out, _ = run(capsys, "compare", "one", "two", "--store", stored(tmp_path / "runs.db", *sides))
    assert out.index("Loss  1 → 3") < out.index("diverge at round 0")
    assert "update norms of c1 (1 against 3); no difference in those of the other 2 clients" in " ".join(out.split())


def test_defaults_are_no_differences_and_are_shown_as_defaults(tmp_path, capsys):
    """A description leaves defaults out, or whole parts of them: what is the same anyway is not listed."""
    own = "clients = 20\n[local]\nbatch = 16\n[local.optimizer]\nkind = 'sgd'\nlearning_rate = 0.1\nmomentum = 0.0\n"
    texts = {"r1": "", "r2": f"{own}[compression]\nkind = 'top_k'\nshare = 0.01\n"}
    runs = [begin(identity, "same", config={"experiment": text}) for identity, text in texts.items()]
    path = stored(tmp_path / "runs.db", *runs)
    differing = {one["name"]: one for one in result(capsys, "compare", "r1", "r2", "--store", path)["settings"]}
    assert {name: one["values"] for name, one in differing.items()} == {
        "experiment.clients": [10, 20],
        "experiment.local.optimizer.learning_rate": [0.05, 0.1],
        "experiment.compression.kind": [None, "top_k"],
        "experiment.compression.share": [None, 0.01],
    }
    assert all(one["defaults"] == [True, False] for one in differing.values())
    _, out, _ = run(capsys, "compare", "r1", "r2", "--store", path)
    assert "0.05 (default)  0.1" in out
    assert "none (default)  top_k" in out


def test_the_copy_of_the_defaults_is_that_of_the_lab():
    """Without the seed and the name, which are told elsewhere, and the faults, which no store has."""
    experiment = pytest.importorskip("fedvitals.lab.experiment", reason="the lab needs torch").Experiment()
    fields = {field: getattr(experiment, field) for field in experiment.__struct_fields__}
    stated = {field: toml._plain(field, part) for field, part in fields.items() if part is not None}
    defaults = flattened({"experiment": stated})
    assert {
        name: defaults[name] for name in defaults if name.split(".")[1] not in ("name", "seed", "faults")
    } == DEFAULTS


def test_one_run_each_tells_nothing_of_chance(store, capsys):
    found = result(capsys, "compare", "slow", "fast", "--store", store)
    assert [side["runs"] for side in found["sides"]] == [["slow-4"], ["fast-4"]]
    assert found["confidence"].startswith("One run each: no difference here can be distinguished from chance.")
    change_ = rows(found)["accuracy, last"]["changes"][0]
    assert (change_["low"], change_["high"]) == (None, None)


def test_repeats_give_an_interval(store, capsys):
    """All runs of each name: 0.9 against 0.7, give or take the seeds' noise."""
    found = result(capsys, "compare", "slow", "fast", "--repeats", "--store", store)
    assert [len(side["runs"]) for side in found["sides"]] == [5, 5]
    (accuracy,) = rows(found)["accuracy, last"]["changes"]
    assert accuracy["low"] < -0.2 < accuracy["high"] < 0
    assert "larger than chance explains" in found["confidence"]
    assert found["partings"][0]["beyond_repeats"] is not None


def test_ids_of_one_name_and_configuration_are_repeats(store, capsys):
    found = result(capsys, "compare", "slow-0", "slow-1", "fast-0", "fast-1", "--store", store)
    assert [side["runs"] for side in found["sides"]] == [["slow-0", "slow-1"], ["fast-0", "fast-1"]]


def test_two_repeats_alone_are_compared_with_each_other(store, capsys):
    found = result(capsys, "compare", "slow-0", "slow-1", "--store", store)
    assert [side["runs"] for side in found["sides"]] == [["slow-0"], ["slow-1"]]
    assert {one["name"]: one["values"] for one in found["settings"]} == {"seed": [0, 1]}


def test_why_is_the_settings_that_differ(store, capsys):
    found = result(capsys, "compare", "slow-0", "fast-0", "--store", store)
    settings = {one["name"]: one["values"] for one in found["settings"]}
    assert settings == {"name": ["slow", "fast"], "experiment.local.lr": [0.1, 0.2]}


def test_settings_by_their_path():
    assert flattened({"a": {"b": 1, "c": [2]}, "experiment": "x = 3"}) == {"a.b": 1, "a.c": [2], "experiment.x": 3}
    assert flattened({"experiment": "no = = toml"}) == {"experiment": "no = = toml"}


def test_where_runs_part(tmp_path):
    """The first difference at all, the first beyond noise, and whose update it was."""
    one, two = run_of("r1", "one"), run_of("r2", "two")
    changes = {(1, "c0"): 1 + 1e-9, (2, "c1"): 3.0}
    for (number, node), norm in changes.items():
        two.add(Metric(Where("r2", number, node), two.at + 1, "update.norm", norm))
    with open_reader(stored(tmp_path / "runs.db", one, two)) as reader:
        (found,) = compare(reader, ["one", "two"]).partings
    assert (found.exact.round, dict(found.exact.nodes), found.exact.same_nodes) == (1, {"c0": (1.0, 1 + 1e-9)}, 2)
    assert (found.beyond_noise.round, dict(found.beyond_noise.nodes)) == (2, {"c1": (1.0, 3.0)})
    assert found.beyond_repeats is None


def test_equal_runs_part_nowhere(tmp_path, capsys):
    """Also when one of them goes on longer: that is no difference in what both did."""
    longer = run_of("r2", "two", best=0.5)
    longer.round({f"c{i}": (1.0, 2.0, 1.0) for i in range(3)}, accuracy=0.6, loss=0.4)
    path = stored(tmp_path / "runs.db", run_of("r1", "one", best=0.5), longer)
    code, out, _ = run(capsys, "compare", "one", "two", "--store", path)
    assert code == 0
    assert "bit for bit the same, as far as both go (4 rounds)" in " ".join(out.split())


def test_three_runs_and_gsc_with_zero_on_its_own_level(store, capsys):
    code, out, _ = run(capsys, "compare", "slow-0", "fast-0", "slow-1", "fast-1", "slow-2", "--store", store)
    assert code == 0
    level = next(line for line in out.splitlines() if line.strip().startswith("0 ┤"))
    assert set(level.split("┤")[1].split()) == {"B"}


def test_plot_marks_zero_infinity_and_several():
    lines = [line.plain for line in log_plot([{0: 1e-9, 1: 0.0}, {0: 1e-9, 1: float("inf")}], "AB", 40)]
    assert lines[0].strip() == "not finite ┤    B"
    assert lines[-2].rstrip().endswith("0 ┤    A")
    assert any(SEVERAL in line for line in lines)
    assert log_plot([{}, {}], "AB", 40) == []


def test_cells_of_a_bar_add_up():
    assert shares_of({"a": 1.0, "b": 1.0, "c": 1.0}, 10) == {"a": 4, "b": 3, "c": 3}
    assert shares_of({"a": 0.0}, 10) == {}


@pytest.mark.parametrize(("freedom", "sure", "table"), [(1, 0.95, 12.706), (4, 0.95, 2.776), (30, 0.99, 2.750)])
def test_student_is_that_of_the_tables(freedom, sure, table):
    assert student(freedom, sure) == pytest.approx(table, abs=5e-4)


def test_welch_by_hand():
    """Means 2 and 6, variances 1 and 4 of three runs each: error √(5/3), f = 25/9 · 2 / (1/9 + 16/9)."""
    found = change([1, 2, 3], [4, 6, 8])
    reach = student((5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)) * (5 / 3) ** 0.5
    assert (found.difference, found.relative) == (4, 2)
    assert found.high - found.difference == pytest.approx(reach)
    assert change([1], [2]).beyond_chance is None
    assert change([1, 1], [2, 2]).beyond_chance is True
    assert change([], [2]) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["slow-0"], "needs two runs"), (["slow-0", "slow-0"], "needs two runs"), (["slo", "fast"], "slow")],
)
def test_wrong_use_is_told(store, capsys, arguments, words):
    code, _, err = run(capsys, "compare", *arguments, "--store", store)
    assert code == 2
    assert words in err


def test_the_same_seeds_are_compared_seed_by_seed(tmp_path, capsys):
    """Accuracy falls by about 0.03 with each of three seeds, which differ by 0.2 themselves: Welch sees nothing."""
    told = []
    for seed, best, less in ((7, 0.9, 0.03), (8, 0.7, 0.028), (9, 0.8, 0.032)):
        told.append(run_of(f"a-{seed}", "a", seed=seed, best=best, started=STARTED + seed))
        told.append(run_of(f"b-{seed}", "b", seed=seed, best=best - less, rate=0.2, started=STARTED + 99 - seed))
        told.append(run_of(f"c-{seed}", "c", seed=seed + 1, best=best - less, rate=0.3, started=STARTED + 200))
    path = stored(tmp_path / "runs.db", *told)
    found = result(capsys, "compare", "a", "b", "--repeats", "--store", path)
    (accuracy,) = rows(found)["accuracy, last"]["changes"]
    assert accuracy["paired"]
    assert -0.04 < accuracy["low"] < -0.03 < accuracy["high"] < -0.02
    assert "seed by seed, over the seeds 7, 8, 9" in found["confidence"]
    assert found["partings"][0]["beyond_repeats_by"] == "accuracy"
    found = result(capsys, "compare", "a", "c", "--repeats", "--store", path)
    (accuracy,) = rows(found)["accuracy, last"]["changes"]
    assert not accuracy["paired"]
    assert accuracy["low"] < 0 < accuracy["high"]
    assert "after Welch" in found["confidence"]


def test_paired_by_hand():
    """Differences 1, 2 and 3: 2 ± 4.303 · 1/√3. All the same: counts, of which chance makes such, so Welch judges."""
    assert pairing([7, 8, 9], [9, 7, 8]) == [1, 2, 0]
    for one, two in (([7, 8], [7, 9]), ([7, 7], [7, 7]), ([None, None], [None, None]), ([7, 8], [7, 8, 9]), ([7], [7])):
        assert pairing(one, two) is None
    found = change([10, 20, 30], [23, 31, 12], pairs=pairing([7, 8, 9], [8, 9, 7]))
    assert (found.difference, found.paired) == (2, True)
    assert found.high - found.difference == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    same = change([3, 4, 5], [4, 5, 6], pairs=[0, 1, 2])
    assert (same.difference, same.paired, same.beyond_chance) == (1, False, False)
    assert not change([1, 2], [3, float("nan")], pairs=[0, 1]).paired
