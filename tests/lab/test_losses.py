# SPDX-License-Identifier: Apache-2.0
"""Losses against hand values, PyTorch's own functions and slow twins; every kind of targets against its losses."""

import math

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fedvitals.errors import ConfigError
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.datasets import load
from fedvitals.lab.losses import (
    BCE,
    LOSSES,
    MSE,
    TARGETS,
    Contrastive,
    CrossEntropy,
    Distillation,
    Huber,
    MultiTask,
    usual_loss,
)
from fedvitals.lab.streams import stream

LOGITS = torch.randn(6, 4, generator=stream(1, "logits"))
Y = torch.tensor([0, 1, 2, 3, 1, 1])


def dataset(y, **more):
    return load(Arrays(torch.randn(len(y), 3, generator=stream(1, "x")), y, torch.zeros(1, 3), y[:1], **more))


def test_plain_cross_entropy_is_torchs_to_the_bit():
    loss = CrossEntropy()
    assert torch.equal(loss(LOGITS, Y), F.cross_entropy(LOGITS, Y))
    assert torch.equal(loss(LOGITS, Y, reduction="none"), F.cross_entropy(LOGITS, Y, reduction="none"))
    assert loss.plain
    assert not CrossEntropy(smoothing=0.1).plain


def test_smoothed_cross_entropy_is_a_mix_with_the_mean_over_classes():
    """By hand: (1 − ε) · −log p(y) + ε · mean of −log p over all classes."""
    logs = torch.log_softmax(LOGITS.double(), 1)
    expected = 0.9 * -logs[torch.arange(6), Y] + 0.1 * -logs.mean(1)
    torch.testing.assert_close(CrossEntropy(smoothing=0.1).each(LOGITS, Y).double(), expected)


def test_balanced_weights_are_those_of_scikit_learn():
    weight = pytest.importorskip("sklearn.utils.class_weight")
    balanced = CrossEntropy(class_weights="balanced").prepared(dataset(Y))
    expected = weight.compute_class_weight("balanced", classes=np.arange(4), y=Y.numpy())
    assert balanced.class_weights == pytest.approx(expected)
    own = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(balanced(LOGITS, Y), F.cross_entropy(LOGITS, Y, own))


def test_tokens_that_are_ignored_do_not_count():
    logits = torch.randn(2, 3, 4, generator=stream(2, "logits"))
    y = torch.tensor([[0, 1, -100], [2, 3, 1]])
    first = -torch.log_softmax(logits, 2)[0, [0, 1], [0, 1]]
    second = -torch.log_softmax(logits, 2)[1, [0, 1, 2], [2, 3, 1]]
    loss = CrossEntropy()
    torch.testing.assert_close(loss.each(logits, y), torch.stack([first.mean(), second.mean()]))
    torch.testing.assert_close(loss(logits, y), torch.cat([first, second]).mean())
    right = torch.tensor([[4.0, 0, 0], [0, 4.0, 0], [0, 4.0, 0]])[None]
    assert loss.score(right, torch.tensor([[0, 0, -100]])).tolist() == [0.5]


def test_mixup_is_as_a_slow_twin_computes_it():
    model, x = torch.nn.Linear(3, 4), torch.randn(6, 3, generator=stream(3, "x"))
    torch.manual_seed(5)
    ours = CrossEntropy(mixup=0.4).of_batch(model, x, Y)
    torch.manual_seed(5)
    share, other = float(torch.distributions.Beta(0.4, 0.4).sample()), torch.randperm(6)
    logs = torch.log_softmax(model(share * x + (1 - share) * x[other]), 1)
    soft = share * F.one_hot(Y, 4) + (1 - share) * F.one_hot(Y[other], 4)
    torch.testing.assert_close(ours, -(soft * logs).sum(1).mean())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(MSE(), (1 + 9) / 2), (Huber(), (0.5 + 2.5) / 2), (Huber(delta=2), (0.5 + 4) / 2)],
)
def test_errors_of_numbers_by_hand(loss, expected):
    outputs, y = torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 2.0]])
    assert loss.each(outputs, y).tolist() == [expected]
    assert loss.score(outputs, y).tolist() == [2.0]
    assert loss.score_name == "absolute_error"


def test_binary_cross_entropy_by_hand():
    outputs, y = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[1.0, 0.0]])
    assert BCE().each(outputs, y).item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert BCE().score(outputs, y).tolist() == [0.0]


def test_supervised_contrastive_loss_is_as_a_slow_twin_computes_it():
    vectors = F.normalize(LOGITS.double(), dim=1)
    expected = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        total = sum(math.exp(vectors[i] @ vectors[j] / 0.5) for j in others)
        same = [j for j in others if Y[j] == Y[i]]
        terms = [-(float(vectors[i] @ vectors[j]) / 0.5 - math.log(total)) for j in same]
        expected.append(sum(terms) / max(len(same), 1))
    ours = Contrastive(temperature=0.5).each(LOGITS, Y)
    assert ours.tolist() == pytest.approx(expected, rel=1e-5)


def test_distillation_by_hand():
    """Cross-entropy plus w · T² · Σ p log(p / q), with p the received model's and q the own softened answers."""
    own, received = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    x, temperature, weight = torch.randn(6, 3, generator=stream(4, "x")), 3.0, 0.7
    p = torch.softmax(received(x) / temperature, 1)
    q = torch.softmax(own(x) / temperature, 1)
    distance = (p * (p / q).log()).sum(1).mean()
    expected = F.cross_entropy(own(x), Y) + weight * temperature**2 * distance
    loss = Distillation(weight=weight, temperature=temperature)
    torch.testing.assert_close(loss.of_batch(own, x, Y, received), expected)
    torch.testing.assert_close(loss.of_batch(own, x, Y, own), F.cross_entropy(own(x), Y))


def test_tasks_are_summed_with_their_weights():
    outputs, y = (LOGITS, torch.zeros(6, 1)), torch.stack([Y.float(), torch.full((6,), 2.0)], 1)
    loss = MultiTask(weights=(1.0, 0.25))
    torch.testing.assert_close(loss(outputs, y), F.cross_entropy(LOGITS, Y) + 0.25 * 4)
    assert torch.equal(loss.score(outputs, y), LOGITS.argmax(1) == Y)


@pytest.mark.parametrize("targets", TARGETS)
def test_every_kind_of_targets_has_a_usual_loss_that_takes_it(targets):
    assert targets in usual_loss(targets).targets


@pytest.mark.parametrize("kind", LOSSES)
def test_descriptions_survive_the_way_through_plain_values(kind):
    assert msgspec.convert(msgspec.to_builtins(kind()), kind) == kind()


@pytest.mark.parametrize(
    ("loss", "y", "words"),
    [
        (MSE(), Y, "one class per sample. Take cross_entropy or contrastive or distillation"),
        (CrossEntropy(), torch.rand(6), "which are numbers. Take mse or huber"),
        (CrossEntropy(class_weights=(1, 2)), Y, "4 numbers"),
        (BCE(), Y, "one class"),
    ],
)
def test_a_loss_that_cannot_take_the_targets_is_refused(loss, y, words):
    with pytest.raises(ConfigError, match=words):
        loss.prepared(dataset(y))


def test_parts_of_tasks_must_fit_their_outputs():
    data = dataset(torch.stack([Y.float(), Y.float()], 1), tasks=(4, 1))
    with pytest.raises(ConfigError, match="another loss"):
        MultiTask(parts=(MSE(), MSE())).prepared(data)
    with pytest.raises(ConfigError, match="one for each task"):
        MultiTask(parts=(CrossEntropy(),)).prepared(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CrossEntropy(smoothing=1.0), "below 1"),
        (lambda: CrossEntropy(mixup=-1.0), "0 or more"),
        (lambda: CrossEntropy(class_weights=(0.0, 0.0)), "not all 0"),
        (lambda: Huber(delta=0.0), "above 0"),
        (lambda: Contrastive(temperature=0.0), "above 0"),
        (lambda: Distillation(weight=-1.0), "0 or more"),
        (lambda: MultiTask(weights=(1.0,)), "2 numbers"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
