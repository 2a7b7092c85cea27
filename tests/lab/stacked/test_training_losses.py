# SPDX-License-Identifier: Apache-2.0
"""Training losses in the lab: clients that train as one batch tell what each tells alone."""

import numpy as np
import pytest

from fedvitals import lab
from fedvitals.probes.presets import Preset
from support.models import watched

LOSSES = Preset("losses", (), fit_percent=0, training_losses=1)
EXPERIMENTS = {
    "several passes": {"local": lab.Local(epochs=3, batch=16)},
    "less than a pass": {"local": lab.Local(iterations=2, batch=8)},
    "accumulated": {"local": lab.Local(epochs=2, batch=8, accumulate=2, optimizer=lab.SGD(0.1, momentum=0.5))},
    "class weights": {
        "loss": lab.CrossEntropy(class_weights="balanced"),
        "local": lab.Local(epochs=2, optimizer=lab.Adam()),
    },
    "a crash": {"faults": [lab.crash(nodes=["c2"], at_step=0)]},
    "half precision": {"local": lab.Local(epochs=1, batch=16, precision="bfloat16")},
}


def numbers(e, engine):
    """Metrics and matrices of the run, by round, node and name."""
    monitor, sink = watched(LOSSES, machine=False)
    with monitor:
        lab.run(e, monitor, engine=engine, workers=1)
    names = ("train.", "optimizer.", "batch.")
    metrics = {(m.where.round, m.where.node, m.name): m.value for m in sink.metrics() if m.name.startswith(names)}
    tables = [r for r in sink.records if getattr(r, "family", "") == "training.classes"]
    return metrics, {(r.where.round, r.where.node): r.matrix for r in tables}, sink


@pytest.mark.parametrize("case", EXPERIMENTS)
def test_stacked_clients_tell_what_each_tells_alone(case):
    e = lab.Experiment(
        dataset=lab.synthetic(samples=600), model="mlp", clients=5, rounds=2, partition=lab.quantity_skew(), seed=3,
        **EXPERIMENTS[case],
    )  # fmt: skip
    (metrics, tables, _), (wanted, wanted_tables, twin) = (numbers(e, engine) for engine in ("stacked", "sequential"))
    crashed = {key for key in metrics if case == "a crash" and key[1] == "c2"}
    assert metrics.keys() - crashed == wanted.keys() - crashed
    assert {name for _, _, name in wanted} >= {"train.loss_first", "train.accuracy", "optimizer.momentum", "batch.size"}
    rounded = case == "half precision"  # which decides between two nearly equal guesses
    for key in wanted.keys() - crashed:
        if not rounded or "loss" in key[2]:
            assert metrics[key] == pytest.approx(wanted[key], rel=2e-2 if rounded else 1e-3, abs=1e-4), key
    for key in {key for key in wanted_tables if key[1] is not None} - {key[:2] for key in crashed}:
        np.testing.assert_allclose(tables[key][:, 0], wanted_tables[key][:, 0])
        np.testing.assert_allclose(tables[key][:, 1], wanted_tables[key][:, 1], rtol=5e-2 if rounded else 1e-3)
        if not rounded:
            np.testing.assert_allclose(tables[key], wanted_tables[key], rtol=1e-3, atol=1e-3)
    assert not twin.events("probe.abstains")


@pytest.mark.parametrize(
    ("engine", "changed"),
    [("stacked", {"smoothing": 0.1}), ("sequential", {"smoothing": 0.1}), ("sequential", {"mixup": 0.4})],
)
def test_other_losses_are_left_out(engine, changed):
    loss = lab.CrossEntropy(**changed)
    e = lab.Experiment(dataset=lab.synthetic(samples=300), model="mlp", clients=3, rounds=2, loss=loss)
    metrics, tables, _ = numbers(e, engine)
    assert not [key for key in metrics if key[2].startswith("train.")]
    assert not tables


def test_bands_of_tokens_and_lengths_are_the_same():
    """Of a language model: bytes, of which blocks of 20 are the texts."""
    e = lab.Experiment(
        dataset=lab.text(packages=3, package_bytes=4000, steps=20), model=lab.gpt(width=8, layers=1), clients=3,
        rounds=1, partition=lab.quantity_skew(), local=lab.Local(epochs=2, batch=16),
    )  # fmt: skip
    (metrics, _, sink), (wanted, _, twin) = (numbers(e, engine) for engine in ("stacked", "sequential"))
    assert {name for _, _, name in wanted} >= {"train.loss_first", "train.loss_short"}
    assert metrics == {key: pytest.approx(value, rel=1e-4) for key, value in wanted.items()}
    for client in ("c0", "c1", "c2"):
        texts = twin.value("samples", node=client)
        for family, targets in (("training.tokens", 20 * texts), ("training.lengths", 20 * texts)):
            matrices = [own.layers(family, node=client).matrix for own in (sink, twin)]
            np.testing.assert_allclose(*matrices, rtol=1e-3, atol=1e-3)
            assert 0.9 * targets <= matrices[0][:, 0].sum() <= targets  # less bands of few
        assert matrices[0][1, -1] == texts
