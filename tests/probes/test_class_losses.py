# SPDX-License-Identifier: Apache-2.0
"""The sums behind training losses by class, and their way to whoever reads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.probes.class_losses import ClassSums, ClassTotals, judge_gradients, judge_labels, last_quota, pass_masks
from fedvitals.probes.presets import preset
from fedvitals.stats import CLASS_COLUMNS, derive
from fedvitals.testing import MemorySink
from support.models import make, make_data, train, watched


def test_which_samples_are_of_which_pass():
    places = np.arange(100)
    first, last = pass_masks(places, 40, last_quota(40), 100)
    assert np.flatnonzero(first).tolist() == [*range(40)]
    assert np.flatnonzero(last).tolist() == [*range(64, 80)]  # of the last 40, those at the end of a pass
    _, last = pass_masks(places, 40, last_quota(40), 80)
    assert np.flatnonzero(last).tolist() == [*range(64, 80)]
    assert not pass_masks(places[:20], 40, last_quota(40), 20)[1].any()


def test_a_model_that_is_sure_and_one_that_is_lost():
    """Rounding leaves nothing of the label's own entry where the model is sure; what is not finite is left out."""
    logits = torch.tensor([[90.0, 0, 0], [0, 40, 0], [0, 0, 17.5], [30, 0, 29], [torch.nan, 0, 0], [0, torch.inf, 0]])
    y = torch.tensor([0, 1, 2, 2, 0, 1])
    rows = logits.clone().requires_grad_()
    functional.cross_entropy(rows, y).backward()
    judged = judge_gradients(logits, rows.grad)
    assert judged.counted.tolist() == [True] * 4 + [False] * 2
    assert judged.labels[:4].tolist() == [0, 1, 2, 2]
    assert not judged.odd.any()
    wanted = functional.cross_entropy(logits[:4].double(), y[:4], reduction="none")
    np.testing.assert_allclose(judged.losses[:4], wanted, atol=1e-6)


def test_labels_and_gradients_tell_the_same():
    stream = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0, 100.0):
        logits, y = scale * torch.randn(200, 7, generator=stream), torch.randint(0, 7, (200,), generator=stream)
        rows = logits.clone().requires_grad_()
        functional.cross_entropy(rows, y).backward()
        sums = []
        for judged in (judge_gradients(logits, rows.grad), judge_labels(logits, y)):
            assert judged.counted is None or judged.counted.all()
            assert judged.labels.tolist() == y.tolist()
            totals = ClassTotals(7, logits.device)
            totals.add_first(judged)
            sums.append(ClassSums(totals, totals.numbers.numpy()).tables["training.classes"])
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6)


def federation(monitor, through_worker=False, rounds=2):
    for number in range(rounds):
        with monitor.round(number):
            for seed in range(3):
                model, observer = make("mlp"), monitor.host.for_worker() if through_worker else monitor
                with observer.client(f"c{seed}", model, data=make_data(seed=seed)):
                    train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(seed=seed), 12)
                if through_worker:
                    monitor.host.absorb(observer.payload())


def test_workers_and_the_store_tell_the_same(tmp_path):
    """Directly, through a worker's payload, from memory and from the file; and merged over the round."""
    each_round = replace(preset("standard"), training_losses=1)
    direct, sink = watched(each_round)
    with direct:
        federation(direct)
    worker, away = watched(each_round)
    with worker:
        federation(worker, through_worker=True)
    with fv.Monitor(tmp_path / "runs.db", probes=each_round, strict=True, detectors=[]) as monitor:
        federation(monitor)
        run = monitor.run.id
    with fv.store.open_reader(tmp_path / "runs.db") as reader:
        history = reader.history(run)
        assert history.layers("training.classes") == ("0", "1", "2")
        for number in range(2):
            nodes, columns = history.across("training.classes", CLASS_COLUMNS, number)
            assert [node for node in nodes if node != "server"] == ["c0", "c1", "c2"]
            for node, matrix in zip(nodes, columns, strict=True):
                wanted = sink.layers("training.classes", node=node, round=number).matrix
                np.testing.assert_allclose(matrix, wanted, rtol=1e-6)
                np.testing.assert_allclose(
                    away.layers("training.classes", node=node, round=number).matrix, wanted, 1e-6
                )
            whole = sink.layers("training.classes", node=None, round=number).matrix
            np.testing.assert_allclose(whole, columns.sum(0), rtol=1e-5)
    table = sink.layers("training.classes", node="c0", round=0).matrix
    np.testing.assert_allclose(derive("training.classes", table, "loss_mean"), table[:, 1] / table[:, 0])
    np.testing.assert_allclose(derive("training.classes", table, "accuracy"), table[:, 3] / table[:, 0])
    assert (derive("training.classes", table, "loss_std") > 0).all()


@pytest.mark.parametrize("privacy", [1, 2, 3])
def test_privacy_levels(privacy):
    """The table and the confused pair need level 3, the means level 2; a sum over a cohort passes at level 1."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], privacy=privacy, cohort=3, strict=True) as monitor:
        federation(monitor)
    families = {r.where.node for r in sink.records if getattr(r, "family", "") == "training.classes"}
    assert families == ({None, "c0", "c1", "c2"} if privacy == 3 else {None})
    assert bool(sink.metrics("train.loss_first", node="c0")) == (privacy >= 2)
    assert bool(sink.metrics("optimizer.learning_rate", node="c0")) == (privacy >= 2)
    assert bool(sink.metrics("train.confused_label", node="c0")) == (privacy >= 3)
