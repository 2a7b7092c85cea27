# SPDX-License-Identifier: Apache-2.0
"""Samples that nobody trains on, measured at the end of a round."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.testing import MemorySink


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))


X, Y = torch.randn(50, 6), torch.randint(0, 3, (50,))
TEXTS = torch.randint(0, 20, (40, 9))


def measured(model, held_back, **options):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        for number in range(2):
            with monitor.round(number, model, held_back=held_back, **options):
                pass
    return [(m.where.node, m.where.round, m.value) for m in sink.metrics() if m.name == "held_back.loss"]


@pytest.mark.parametrize("data", [(X, Y), DataLoader(TensorDataset(X, Y), 16, shuffle=True)])
def test_the_loss_is_that_of_the_model_in_evaluation(data):
    model, before = classifier(), torch.get_rng_state()
    state = copy.deepcopy(model.state_dict())
    torch.set_rng_state(before)
    losses = measured(model, data)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], values) for name, values in model.state_dict().items())
    assert model.training
    with torch.no_grad():
        expected = float(functional.cross_entropy(copy.deepcopy(model).eval()(X), Y))
    assert losses == [(None, number, pytest.approx(expected, rel=1e-5)) for number in range(2)]


def test_the_model_before_the_first_round_is_measured_once():
    sink, model = MemorySink(), classifier()
    with torch.no_grad():
        expected = float(functional.cross_entropy(copy.deepcopy(model).eval()(X), Y))
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        for number in range(2):
            with monitor.round(number, model, held_back=(X, Y)):
                model[0].weight.data.mul_(2)
    (initial,) = sink.metrics("initial.held_back.loss")
    assert (initial.where.round, initial.value) == (0, pytest.approx(expected, rel=1e-5))
    assert sink.value("held_back.loss", round=0) != pytest.approx(expected, rel=1e-3)


def test_texts_need_no_loss_function_and_another_one_may_be_given():
    x, y = TEXTS[:, :-1], TEXTS[:, 1:]
    model = language_model()
    with torch.no_grad():
        expected = float(functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    assert measured(model, (x, y))[0][2] == pytest.approx(expected, rel=1e-5)
    doubled = measured(
        model, (x, y), loss=lambda out, own: 2 * functional.cross_entropy(out.flatten(0, 1), own.flatten())
    )
    assert doubled[0][2] == pytest.approx(2 * expected, rel=1e-5)


def _rows_of_hugging_face(rows):
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    return datasets.Dataset.from_list(
        [{"text": "a", **{name: part.tolist() for name, part in r.items()}} for r in rows]
    )


def test_samples_as_mappings_may_be_pictures_as_well():
    model = classifier()
    with torch.no_grad():
        expected = float(functional.cross_entropy(copy.deepcopy(model).eval()(X), Y))
    assert measured(model, [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)])[0][2] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [lambda rows: DataLoader(rows, 8), list, _rows_of_hugging_face])
def test_the_models_own_loss_is_used_where_it_takes_labels(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in TEXTS[:16]]
    with torch.no_grad():
        expected = float(model.eval()(input_ids=TEXTS[:16], labels=TEXTS[:16]).loss)
    assert measured(model.train(), kind(rows))[0][2] == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft has older names for settings
def test_the_loss_of_a_model_that_peft_has_wrapped_is_its_own():
    """Its `forward` takes everything; targets are the next tokens, and not those at the same place."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    rows = {"input_ids": TEXTS[:16], "labels": TEXTS[:16]}
    with torch.no_grad():
        expected = float(model.eval()(**rows).loss)
    assert measured(model, rows)[0][2] == pytest.approx(expected, rel=1e-5)


def test_texts_that_nobody_has_padded_are_refused_with_the_remedy():
    sink = MemorySink()
    rows = [{"input_ids": row[: 5 + i % 3], "labels": row[: 5 + i % 3]} for i, row in enumerate(TEXTS)]
    with fv.Monitor(None, sinks=[sink]) as monitor, monitor.round(0, language_model(), held_back=rows):
        pass
    assert "collate_fn" in sink.events("probe.abstains")[0].message


def test_what_cannot_be_measured_costs_nothing_but_the_measure():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink]) as monitor:
        for number in range(2):
            with monitor.round(number, classifier(), held_back=(X, torch.randn(50, 3))):
                pass
    assert "held_back.loss" not in sink.names()
    assert [e.name for e in sink.events()] == ["probe.abstains"]  # once


def test_forgetting_is_found_without_an_evaluation_of_ones_own():
    model = language_model()
    x, y = TEXTS[:, :-1], (TEXTS[:, :-1] + 1) % 20
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for number in range(6):
            target = y if number < 4 else TEXTS[:, 1:]  # other texts than those that are held back
            with monitor.round(number, model, held_back=(x, y)):
                for _ in range(20):
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
                    optimizer.step()
        monitor.flush()
        named = [f.where.round for f in monitor.findings() if f.issue == "FORGETTING"]
    assert named
    assert named[0] in (4, 5)
