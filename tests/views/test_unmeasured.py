# SPDX-License-Identifier: Apache-2.0
"""What a card says of measures that are missing or seldom: the true reason."""

import copy

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals import lab
from fedvitals.probes.presets import FIT_PERCENT, SCALE_PERCENT
from fedvitals.store import open_reader
from fedvitals.views.adapters import adapters_page
from fedvitals.views.card import health_card, how_often
from fedvitals.views.unmeasured import MASKED, UNSEEN, Seldom
from support.models import make, make_data, train
from support.verbs import run as verb


def card_of(store, run):
    with open_reader(store) as reader:
        return health_card(reader, run)


def reason_for(card, metric):
    return next(needs for names, needs in card.absent.items() if metric in names.split(", "))


def client_of(observer, name, model, data=None, **more):
    with observer.client(name, model, data=data, **more):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)


def test_workers_without_updates_are_named_as_the_reason(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        for number in range(2):
            model = make("mlp")
            with monitor.round(number, model):
                worker = monitor.host.for_worker()
                for name in ("c0", "c1"):
                    client_of(worker, name, copy.deepcopy(model))
                    monitor.host.absorb(worker.payload())
    card = card_of(tmp_path / "runs.db", monitor.run.id)
    assert reason_for(card, "update.norm") == reason_for(card, "update.cosine_mean") == UNSEEN
    assert "monitor.updates" in UNSEEN


def test_a_loop_without_models_or_updates_needs_either(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor, monitor.round(0), monitor.client("a"):
        monitor.log(loss=1.0)
    card = card_of(tmp_path / "runs.db", monitor.run.id)
    assert reason_for(card, "update.norm") == "a model in `monitor.client`, or `monitor.updates`"


def test_secure_aggregation_is_named_as_the_reason(tmp_path, capsys):
    experiment = lab.Experiment(
        dataset="digits", model="mlp", clients=4, rounds=2, secure_aggregation=lab.SecureAggregation()
    )
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        lab.run(experiment, monitor, engine="sequential")
    card = card_of(tmp_path / "runs.db", monitor.run.id)
    assert reason_for(card, "update.norm") == reason_for(card, "update.cosine_mean") == MASKED
    _, out, _ = verb(capsys, "show", monitor.run.id, "--store", tmp_path / "runs.db")
    assert out.count("secure aggregation hides") == 1
    assert "update.norm: needs a model" not in out


def test_what_a_probe_said_when_it_abstained_is_the_reason(tmp_path):
    def loss(_output, _y):
        raise RuntimeError("out of order")

    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor, monitor.round(0):
        client_of(monitor, "c0", make("mlp"), make_data(), loss=loss)
    card = card_of(tmp_path / "runs.db", monitor.run.id)
    assert "out of order" in reason_for(card, "fit.loss_before")


def test_how_seldom_and_why_is_shown(tmp_path, capsys):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        for number in range(8):
            model = make("mlp")
            with monitor.round(number, model):
                for name in ("c0", "c1", "c2", "c3"):
                    client_of(monitor, name, copy.deepcopy(model), make_data(), loss=functional.cross_entropy)
    card = card_of(tmp_path / "runs.db", monitor.run.id)
    by_probe = {own.probe: own for own in card.seldom}
    assert {probe: own.budget for probe, own in by_probe.items()} == {
        "fit": FIT_PERCENT,
        "gradient scale": SCALE_PERCENT,
    }
    for own in by_probe.values():
        assert 0 < own.measured < own.client_rounds == 32
        assert own.text in how_often(card)
    assert by_probe["gradient scale"].samples == 16
    _, out, _ = verb(capsys, "show", monitor.run.id, "--store", tmp_path / "runs.db")
    assert by_probe["fit"].text in " ".join(out.split())


@pytest.mark.parametrize(
    ("seldom", "text"),
    [
        (
            Seldom("fit", 43, 400, 8.0, 0.7),
            "fit in 43 of 400 client-rounds, on 8 samples: a budget of 0.7 % of the training's work",
        ),
        (Seldom("fit", 400, 400, 64.0, None), "fit in 400 of 400 client-rounds, on 64 samples"),
        (Seldom("nonlinearity", 4, 20, None, None), "nonlinearity in 4 of 20 client-rounds"),
    ],
)
def test_the_sentence(seldom, text):
    assert seldom.text == text


def test_a_partly_frozen_model_without_low_rank_adapters_says_what_trains(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        model = make("mlp")
        next(model.parameters()).requires_grad_(False)
        tensors = len([*model.parameters()])
        with monitor.round(0, model):
            client_of(monitor, "a", copy.deepcopy(model))
    sentence = f"{tensors - 1} of {tensors} tensors train; none is the A or B of a low-rank adapter"
    assert reason_for(card_of(tmp_path / "runs.db", monitor.run.id), "adapter.*") == f"low-rank adapters: {sentence}"
    with open_reader(tmp_path / "runs.db") as reader:
        assert adapters_page(reader, monitor.run.id).trained == f"{sentence}."
