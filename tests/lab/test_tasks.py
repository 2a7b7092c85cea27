# SPDX-License-Identifier: Apache-2.0
"""Tasks beyond classification of images: each is learnt, by every engine alike, with the same bits twice, watched or
not, and with any number of processes.
"""

import itertools

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError

TASKS = {
    "regression": {"dataset": lab.synthetic(samples=600, targets="numbers"), "model": "mlp"},
    "several numbers": {"dataset": lab.tabular("linnerud"), "model": "logistic", "clients": 2},
    "table": {"dataset": lab.tabular("diabetes"), "model": "mlp", "loss": lab.huber(delta=0.5)},
    "several labels": {"dataset": lab.synthetic(samples=600, targets="labels"), "model": "mlp"},
    "several tasks": {"dataset": lab.synthetic(samples=600, targets="tasks"), "model": "mlp"},
    "tags": {
        "dataset": lab.synthetic(samples=400, targets="tokens", sequence=6, vocabulary=8),
        "model": lab.transformer(width=16, heads=2, layers=1),
    },
    "reconstruction": {"dataset": lab.digits(reconstruct=True), "model": lab.autoencoder(hidden=(16,), code=4)},
    "series": {"dataset": lab.time_series(series=8), "model": lab.gru(hidden=8), "partition": "group_per_client"},
    "weighted": {"dataset": "digits", "model": "mlp", "loss": lab.cross_entropy("balanced", smoothing=0.1)},
    "mixup": {"dataset": "digits", "model": "mlp", "loss": lab.cross_entropy(mixup=0.3)},
    "contrastive": {"dataset": "digits", "model": "mlp", "loss": "contrastive"},
    "distillation": {"dataset": "digits", "model": "mlp", "loss": "distillation"},
}


ONE_BY_ONE = ("several tasks", "series", "mixup", "contrastive", "distillation")


def experiment(task, **changes):
    settings = {"partition": lab.dirichlet(1.0), "clients": 4, "rounds": 3, "seed": 3, **TASKS[task], **changes}
    return lab.Experiment(local=lab.Local(iterations=6, optimizer=lab.adam(0.01)), **settings)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learnt_by_all_engines_alike(task):
    e = experiment(task)
    assert lab.read(e.to_toml()) == e
    one = lab.run(e, engine="sequential")
    assert (
        one.rounds[-1].metrics["loss"]
        < lab.run(experiment(task, rounds=1), engine="sequential").rounds[0].metrics["loss"]
    )
    for engine in ("reuse", "stacked"):
        if engine == "stacked" and task in ONE_BY_ONE:
            with pytest.raises(ConfigError, match="cannot be stacked"):
                lab.run(e, engine=engine, workers=1)
            continue
        other = lab.run(e, engine=engine, workers=1)
        assert other.rounds[-1].metrics == pytest.approx(one.rounds[-1].metrics, rel=2e-3)


@pytest.mark.parametrize("task", ["several tasks", "tags", "mixup", "distillation", "series"])
def test_the_same_bits_watched_or_not_and_with_any_number_of_processes(task, tmp_path):
    e = experiment(task)
    alone = lab.run(e, engine="reuse", workers=1)
    with fv.Monitor(tmp_path / "runs.db") as monitor:
        watched = lab.run(e, monitor, engine="reuse", workers=2)
    assert torch.equal(alone.state, watched.state)


def test_a_model_that_answers_in_another_shape_is_refused():
    with pytest.raises(ConfigError, match="cannot answer for each step"):
        lab.run(experiment("tags", model="mlp"))
    wide = lab.Own(lambda: torch.nn.Linear(32, 3))
    with pytest.raises(ConfigError, match=r"answers \[2, 3\] for 2 samples: it must answer \[2, 1\]"):
        lab.run(experiment("regression", model=wide))


def test_partitions_deal_numbers_by_their_size():
    """Ten bins of equal size: with one bin per client, each client's targets lie close together."""
    e = experiment("regression", partition=lab.classes_per_client(1), clients=10)
    site = lab.Site.of(e)
    spans = [site.dataset.y[shard.train] for shard in site.shards.values()]
    ranges = sorted((float(span.min()), float(span.max())) for span in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert len(ranges) == 10


def test_wrong_labels_of_every_kind_of_targets():
    """The share that is asked for is wrong, the rest as it was, and nothing appears that was not there."""
    fault = lab.label_noise(nodes=["c0"], rate=0.5)
    for task in ("regression", "several labels", "several tasks", "tags", "reconstruction"):
        healthy, faulty = (lab.Site.of(experiment(task, faults=faults)) for faults in ((), (fault,)))
        (x, y), (same_x, wrong) = (site.tensors("c0", 0) for site in (healthy, faulty))
        assert torch.equal(x, same_x)
        if task == "tags":
            assert 0.3 < float((wrong != y).double().mean()) < 0.7
            assert int(wrong.max()) < healthy.dataset.outputs[0]
        else:
            assert 0.3 < float((wrong != y).flatten(1).any(1).double().mean()) < 0.7
            assert torch.equal(wrong.flatten(1).unique(dim=0), y.flatten(1).unique(dim=0))


def test_faults_of_classes_and_of_numbers_are_refused_where_there_are_none():
    with pytest.raises(ConfigError, match="label_flip is about classes, but the targets are numbers"):
        lab.run(experiment("regression", faults=[lab.label_flip(nodes=["c0"])]))
    with pytest.raises(ConfigError, match="the samples are tokens"):
        lab.run(experiment("tags", faults=[lab.input_noise(nodes=["c0"])]))


def test_a_model_with_dropout_is_trained_client_by_client():
    model = lab.Own(lambda: torch.nn.Sequential(torch.nn.Linear(32, 10), torch.nn.Dropout(0.5)), stackable=True)
    e = experiment("weighted", dataset=lab.synthetic(samples=300), model=model, rounds=1)
    assert lab.run(e, workers=1).engine == "reuse"
    with pytest.raises(ConfigError, match="dropout draws random numbers"):
        lab.run(e, engine="stacked")


def test_a_model_in_place_of_its_factory_and_no_engine_are_refused():
    with pytest.raises(ConfigError, match="takes a function that makes the model"):
        lab.Own(torch.nn.Linear(8, 2))
    with pytest.raises(ConfigError, match="The engine is a name"):
        lab.run(experiment("regression"), engine=None)
