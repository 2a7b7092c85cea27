# SPDX-License-Identifier: Apache-2.0
"""The patient of Flower's benchmark, and a real simulation: who is ill is named, who is well is left in peace."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals_studies.bench.flower import bars as bench
from fedvitals_studies.bench.flower.cost import bytes_of, ratio_of
from fedvitals_studies.flower import app_folder
from fedvitals_studies.flower.app_folder import WATCHED, write_app
from fedvitals_studies.flower.planted_faults import NODES, OWN, USUAL, Plant, run_plant
from support.conditions import holds_for_each

pytest.importorskip("flwr")


def sources(app: Path) -> str:
    return "".join(file.read_text() for file in sorted(app.rglob("*.*")))


def test_the_patient_knows_nothing_of_fedvitals_unless_it_is_watched(tmp_path):
    told = {way: sources(write_app(tmp_path / (way or "plain"), way)) for way in WATCHED}
    assert "import fedvitals" not in told[""]
    assert "fv.flower.client_mod()" in told["two-lines"]
    assert "fv.flower.attach(" in told["two-lines"]
    assert "fv.watch(" in told["deep"]
    assert "fv.watch(" not in told["two-lines"]
    assert "patient.alternating:server" in told["alternating"]
    with pytest.raises(ConfigError, match="two-lines"):
        write_app(tmp_path / "other", "two-line")


def test_a_user_changes_two_lines(tmp_path):
    [row] = bench.bench_flower(only=["lines"])
    assert (row["value"], row["verdict"]) == (2, "met")


def test_every_fault_has_its_seeds_and_its_settings():
    plants = bench.plants()
    assert len(plants) == len({plant.name for plant in plants}) == 30
    known = (Path(app_folder.__file__).parent / "digits_app" / "pyproject.toml").read_text()
    for plant in plants:
        assert 0 <= plant.faulty < NODES
        assert holds_for_each(f"\n{name} = " in known for name in plant.settings())
    assert len({Plant("nan", seed).faulty for seed in range(5)}) == 5


def test_a_stretch_is_compared_with_its_neighbours_and_first_rounds_do_not_count():
    """The machine gets slower all the time; fedvitals costs 10 % of what a round takes just then."""
    lines = []
    for block in range(7):
        for number in (1, 2, 3):
            seconds = (1 + 0.1 * block) * (1.1 if block % 2 else 1.0)
            spent = 99.0 if number == 1 else seconds
            lines.append({"block": block, "round": number, "seconds": spent, "cpu": 2 * spent})
    found = ratio_of(lines)
    assert found["overhead_percent"] == pytest.approx(10.0)
    assert (found["low"], found["high"], found["cpu_percent"]) == pytest.approx((10.0, 10.0, 10.0))
    assert found["pairs"] == 3


def test_the_largest_letter_counts(tmp_path):
    file = tmp_path / "letters.jsonl"
    sizes = [(10, 1000), (30, 1000), (20, 1000)]
    file.write_text("".join(json.dumps({"letter": a, "update": b}) + "\n" for a, b in sizes))
    found = bytes_of(file)
    assert (found["letter_bytes"], found["letter_percent"], found["letters"]) == (30, 3.0, 3)


@pytest.mark.parametrize(("words", "message"), [
    (["flower", "--only", "mlp"], "`bench flower` has no bar 'mlp'"),
    (["lab", "--only", "faults"], "`bench lab` has no bar 'faults'"),
    (["flower", "--full"], "belongs to `fedvitals bench lab`"),
    (["lab", "--stores", "x"], "belongs to `fedvitals bench flower`"),
    (["kernel", "--only", "cnn"], "belongs to"),
])  # fmt: skip
def test_bars_of_another_part_are_refused(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words])
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def link():
    """One SuperLink for all simulations."""
    from fedvitals_studies.flower.simulation import SuperLink

    with SuperLink() as started:
        yield started


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return write_app(tmp_path_factory.mktemp("watched") / "app", "two-lines")


@pytest.mark.flower
def test_one_faulty_client_of_eight_is_named(link, watched, tmp_path):
    """NaN in the weights that it sends, from the third round on: it, and nobody else; and each span has its round."""
    said = run_plant(link, watched, Plant("nan"), tmp_path / "nan.db")
    assert said.right, said.cases
    assert said.node is not None
    assert said.answered == said.joined == NODES * OWN["nan"]["num-server-rounds"]
    assert said.missing == ()


@pytest.mark.flower
def test_a_healthy_run_gives_no_finding_and_the_same_weights_as_without_us(link, watched, tmp_path):
    plant = Plant("none", seed=1)
    said = run_plant(link, watched, plant, tmp_path / "none.db")
    assert said.right, said.cases
    assert said.answered == said.joined == NODES * USUAL["num-server-rounds"]
    plain = write_app(tmp_path / "plain")
    link.simulate(plain, plant.settings() | {"results": tmp_path / "bare"}, nodes=NODES)
    with np.load(tmp_path / "none" / "weights.npz") as ours, np.load(tmp_path / "bare" / "weights.npz") as bare:
        assert ours.files == bare.files
        for name in bare.files:
            assert np.array_equal(ours[name], bare[name])
    told, without = (json.loads((tmp_path / run / "rounds.json").read_text()) for run in ("none", "bare"))
    assert [line["loss"] for line in told] == [line["loss"] for line in without]
