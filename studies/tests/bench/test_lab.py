# SPDX-License-Identifier: Apache-2.0
"""The lab's benchmark: both sides do the same work, and what was not measured is never called met."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvitals import lab
from fedvitals.cli.main import main
from fedvitals_studies.bench.lab import bars as bench
from fedvitals_studies.bench.lab import footprint, peers
from fedvitals_studies.bench.lab.study import Timed, conditions, seconds
from fedvitals_studies.bench.lab.work import Subject, write_work

SMALL = {"cnn": Subject("cnn", 3, 4), "mlp": Subject("mlp", 5, 6)}


@pytest.fixture
def no_signs(tmp_path):
    """A folder of data without GTSRB: the images are made up then, which is quicker."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def outcome(name="other", **facts):
    given = {"loss": 2.0, "accuracy": 0.5, "speeds": [10.0, 11.0, 12.0], **facts}
    return peers.Outcome(peers.Arm(name), **given)


@pytest.mark.thorough
@pytest.mark.parametrize("model", SMALL)
def test_files_of_the_work_hold_what_the_lab_trains_on(model, tmp_path, no_signs):
    """Weights, samples and mini-batches that a peer reads are those of the lab's own site."""
    subject = SMALL[model]
    write_work(subject, tmp_path, 2, no_signs)
    experiment = subject.experiment(no_signs)
    site = lab.Site.of(experiment, no_signs)
    x, y = np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy")
    with np.load(tmp_path / "work.npz") as work:
        assert np.array_equal(work["initial"], site.layout.flat(site.module).numpy())
        rows = np.split(work["rows"], work["cuts"])
        assert len(rows) == subject.clients
        for client, node in enumerate(experiment.nodes):
            own_x, own_y = site.tensors(node, 1)
            order = site.order(node, 1, subject.iterations, experiment.local.batch, len(own_y))
            given = work["orders"][1, client]
            assert np.array_equal(x[rows[client]][given], own_x[order].numpy())
            assert np.array_equal(y[rows[client]][given], own_y[order].numpy())


@pytest.mark.thorough
@pytest.mark.parametrize("model", SMALL)
def test_plain_loop_and_lab_agree(model, tmp_path, no_signs):
    """The same loss and accuracy after a round, from processes of their own; and a ratio of their speeds."""
    write_work(SMALL[model], tmp_path, 4, no_signs)
    arms = [
        peers.ours(SMALL[model], no_signs),
        peers.peer("plain loop", "plain_loop.py", Path(sys.executable), tmp_path),
    ]
    found = peers.interleaved(arms, 2, lambda _: None)
    mine, other = found["fedvitals"], found["plain loop"]
    assert (mine.failed, other.failed) == ("", "")
    assert mine.loss == pytest.approx(other.loss, rel=1e-4)
    assert mine.accuracy == pytest.approx(other.accuracy, abs=0.005)
    assert mine.engine in ("reuse", "stacked")
    assert len(mine.speeds) == len(other.speeds) == 2
    assert min(mine.speeds + other.speeds) > 0
    row = bench._against("small", mine, other, {"plain loop": 1e9})
    assert row["verdict"] == "missed"
    assert row["value"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flower", "pfl"])
def test_framework_and_plain_loop_agree(name, tmp_path, no_signs):
    python = peers.environment(name, peers.default_folder(), install=False, tell=lambda _: None)
    if isinstance(python, str):
        pytest.skip(python)
    write_work(SMALL["cnn"], tmp_path, 4, no_signs)
    arms = [
        peers.peer(name, f"{name}_peer.py", python, tmp_path),
        peers.peer("plain loop", "plain_loop.py", Path(sys.executable), tmp_path),
    ]
    found = peers.interleaved(arms, 1, lambda _: None)
    assert (found[name].failed, found["plain loop"].failed) == ("", "")
    assert found[name].loss == pytest.approx(found["plain loop"].loss, rel=1e-4)
    assert peers.differs(found[name], found["plain loop"]) == ""


def test_absent_peer_is_shown_and_not_judged(tmp_path):
    why = peers.environment("pfl", tmp_path, install=False, tell=lambda _: None)
    assert isinstance(why, str)
    assert why.startswith("not installed: no pfl")
    assert "--peers" in why
    arms = [peers.peer("pfl", "pfl_peer.py", why, tmp_path)]
    found = peers.interleaved(arms, 2, lambda _: None)
    row = bench._against("small", outcome("fedvitals"), found["pfl"], {"pfl": 3.0})
    assert (row["value"], row["verdict"]) == (None, why)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('no such luck')", "ended: ValueError: no such luck"),
        ("print('@{\"ready\": true}', flush=True)", "ended: without a word"),
        ('print(\'@{"failed": "2 of 4 answered"}\', flush=True); input()', "failed: 2 of 4 answered"),
    ],
)
def test_peer_that_fails_is_shown_with_its_last_words(code, words):
    arm = peers.Arm("unlucky", (sys.executable, "-c", code))
    found = peers.interleaved([arm], 1, lambda _: None)["unlucky"]
    assert words in found.failed
    assert bench._against("small", outcome("fedvitals"), found, {"unlucky": 3.0})["verdict"] == found.failed


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"loss": 2.01}, "losses differ"),
        ({"loss": float("nan")}, "losses differ"),
        ({"accuracy": 0.52}, "accuracies differ"),
    ],
)
def test_no_verdict_where_other_work_was_done(facts, words):
    row = bench._against("small", outcome("fedvitals", speeds=[99.0] * 3), outcome(**facts), {"other": 3.0})
    assert words in row["verdict"]
    assert "met" not in row["verdict"]


@pytest.mark.parametrize(
    ("value", "low", "high", "bar", "words"),
    [
        (2.0, 1.9, 2.1, {"least": 1.8}, "met"),
        (1.9, 1.7, 2.1, {"least": 1.8}, "met narrowly"),
        (1.7, 1.6, 1.9, {"least": 1.8}, "missed narrowly"),
        (1.7, 1.6, 1.75, {"least": 1.8}, "missed"),
        (0.9, 0.8, 0.95, {"most": 1.0}, "met"),
        (1.4, 1.3, 1.5, {"most": 1.0}, "missed"),
    ],
)
def test_verdict_is_the_middle_values(value, low, high, bar, words):
    assert bench.verdict(value, low, high, **bar) == words


def test_interval_is_of_the_median():
    middle, low, high = bench._interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle == 3.0
    assert 1.0 <= low < middle < high <= 100.0


def test_whole_condition_is_the_sum_of_its_rounds():
    """50 rounds: ten in which everything is measured, forty others, and the start."""
    condition = next(c for c in conditions() if c.rounds == 50)
    timed = Timed(condition, start_up=3.0, thorough=7.0, plain=(4.0, 6.0))
    assert timed.whole(min) == 3 + 10 * 7 + 40 * 4
    assert timed.whole(max) == 3 + 10 * 7 + 40 * 6


def test_study_is_timed_without_the_runs_that_are_beginnings_of_others():
    names = [c.name for c in conditions()]
    assert len(names) == len(set(names)) == 12
    assert sum(c.rounds for c in conditions()) == 450
    assert "initial-centralized-clipped" not in names


@pytest.mark.thorough
def test_rounds_of_a_condition_are_timed(no_signs):
    condition = next(c for c in conditions() if c.topology == "hierarchical")
    found = seconds(condition, every_iteration=True, data=no_signs, clients=4, iterations=2)
    assert len(found.plain) == 2
    assert min(found.start_up, found.thorough, *found.plain) > 0


@pytest.mark.thorough
@pytest.mark.skipif(not footprint.has_proportional_memory(), reason="needs Linux's /proc")
def test_memory_counts_the_workers_and_what_is_shared_once(no_signs):
    """More than one process with torch, less than as many whole ones."""
    peak = footprint.peak_bytes(3, no_signs, watch="nothing", engine="reuse", workers=2)
    alone = footprint.peak_bytes(3, no_signs, watch="nothing", engine="reuse", workers=1)
    assert 100 << 20 < alone < peak < 3 * alone


@pytest.mark.thorough
def test_time_to_the_first_round_is_told_by_the_process_itself():
    pytest.importorskip("sklearn", reason="the digits are in scikit-learn")
    found = footprint.seconds_to_first_round("digits", 10, 1, engine="reuse")
    assert 0 < found["imports"][0] < found["seconds"][0] < 60


def test_options_of_the_lab_are_refused_elsewhere(capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", "kernel", "--peers"])
    assert done.value.code == 2
    assert "belongs to `fedvitals bench lab`" in capsys.readouterr().err


def test_unknown_part_of_the_lab_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", "lab", "--only", "memry"])
    assert done.value.code == 2
    assert "memory" in capsys.readouterr().err


def test_made_up_images_can_be_learnt(no_signs):
    """They are the same each time, and a network that trains on them gets better."""
    dataset = lab.Site.of(Subject("cnn", 2).experiment(no_signs), no_signs).dataset
    again = lab.Site.of(Subject("cnn", 2).experiment(no_signs), no_signs).dataset
    assert dataset.digest == again.digest
    assert dataset.shape == (3, 32, 32)
    assert dataset.classes == 43
    means = torch.stack([dataset.inputs(dataset.x[dataset.y == c]).mean(0) for c in range(43)])
    nearest = torch.cdist(dataset.inputs(dataset.test_x).flatten(1), means.flatten(1)).argmin(1)
    assert float((nearest == dataset.test_y).double().mean()) > 0.9
