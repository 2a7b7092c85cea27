# SPDX-License-Identifier: Apache-2.0
"""Losses of language models by bands of tokens and of lengths of texts, against the targets themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedvitals.probes import training_losses
from fedvitals.probes.class_losses import ClassSums, ClassTotals, judge_gradients, text_rows
from fedvitals.probes.presets import preset
from fedvitals.stats import FEWEST_IN_BAND, LENGTH_BOUNDS, TOKEN_BOUNDS, derive
from support.models import close, flat, watched
from support.pretended_device import DeviceTensor, Pretending, away, here
from support.text_training import IGNORED, POSITIONS, VOCABULARY, Language, make_texts, steps
from support.trained_losses import LOSSES, Twin, check_abstains, trained

NAMES = ("train.loss_common", "train.loss_rare", "train.loss_short", "train.loss_long")


def expected(twin, stride=1):
    """The tables by bands and the metrics, target by target; of every so many rows of each output."""
    tokens, lengths = np.zeros((len(TOKEN_BOUNDS) + 1, 4)), np.zeros((len(LENGTH_BOUNDS) + 1, 5))
    halves = {name: [] for name in NAMES}
    for logits, labels in zip(twin.logits, twin.labels, strict=True):
        sizes = (labels >= 0).sum(1, keepdim=True).expand(labels.shape).flatten()[::stride].tolist()
        rows, targets = logits.flatten(0, 1)[::stride], labels.flatten()[::stride]
        for row, target, size in zip(rows, targets.tolist(), sizes, strict=True):
            if target < 0:
                continue
            loss = float(functional.cross_entropy(row, torch.tensor(target)))
            own = [1, loss, loss * loss, float(row.argmax() == target)]
            tokens[sum(bound <= target for bound in TOKEN_BOUNDS)] += own
            lengths[sum(bound <= size for bound in LENGTH_BOUNDS)] += [*own, stride / size]
            halves["train.loss_common" if target < 1024 else "train.loss_rare"].append(loss)
            halves["train.loss_short" if size < 128 else "train.loss_long"].append(loss)
    lengths[:, 4] = lengths[:, 4].round()
    tokens[tokens[:, 0] < FEWEST_IN_BAND] = 0
    lengths[lengths[:, 4] < FEWEST_IN_BAND] = 0
    known = NAMES if twin.logits[0].shape[-1] > 1024 else NAMES[2:]
    return tokens, lengths, {name: np.mean(halves[name]) for name in known if halves[name]}


def check(sink, twin, stride=1, tolerance=1e-4):
    tokens, lengths, metrics = expected(twin, stride)
    assert tokens.any()
    assert lengths.any()
    np.testing.assert_allclose(sink.layers("training.tokens", node="c0").matrix, tokens, tolerance, tolerance)
    np.testing.assert_allclose(sink.layers("training.lengths", node="c0").matrix, lengths, tolerance, tolerance)
    for name in NAMES:
        assert (name in sink.names()) == (name in metrics)
        if name in metrics:
            close(sink.value(name, node="c0"), metrics[name], tolerance)
    assert not sink.events("probe.abstains")


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plain_loop(flattened, accumulate):
    data = make_texts()
    sink, twin = trained(Language(flattened=flattened), steps(data, accumulate=accumulate))
    check(sink, twin)
    bands = sink.table(sink.layers("training.tokens", node="c0").table).names
    assert bands[0] == "0–15"
    assert bands[-1] == "65,536 and more"
    bands = sink.table(sink.layers("training.lengths", node="c0").table).names
    assert bands[:2] == ("1–15", "16–31")
    every = sink.layers("training.tokens", node="c0").matrix
    close(derive("training.tokens", every.sum(0), "loss_mean"), sink.value("train.loss_first", node="c0"), 1e-5)


def test_long_texts_and_several_passes():
    """The first pass over the client's texts counts; long texts are told from short ones."""
    data = make_texts(texts=16, positions=200, vocabulary=1200)
    once = steps(data, loss=lambda z, y: functional.cross_entropy(z, y, reduction="sum") / 1000)

    def run(model, twin):
        for _ in range(3):
            once(model, twin)

    sink, twin = trained(Language(1200), run, TensorDataset(*data))
    twin.logits, twin.labels = twin.logits[:4], twin.labels[:4]
    check(sink, twin)
    assert {*NAMES} <= {*sink.names()}


@pytest.mark.parametrize(("most", "stride"), [(VOCABULARY * POSITIONS, 4), (12 * VOCABULARY, 14)])
def test_of_large_outputs_some_rows_tell_the_losses_and_all_the_lengths(monkeypatch, most, stride):
    monkeypatch.setattr(training_losses, "MOST_NUMBERS", most)
    monkeypatch.setattr(training_losses, "MOST_WAITING", 3 * most)
    sink, twin = trained(Language(), steps(make_texts(texts=64)))
    check(sink, twin, stride)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision(precision):
    sink, twin = trained(Language(), steps(make_texts(), precision=precision))
    check(sink, twin, tolerance=2e-3)


def test_padding_of_which_the_model_is_certain_does_not_count():
    """Nor does it lengthen a text."""
    x, y = torch.zeros(8, 20, dtype=torch.long), torch.full((8, 20), IGNORED)
    x[:, :3], y[:, :3] = 5, 7
    model = Language(300)
    with torch.no_grad():
        model.embed.weight[0], model.head.weight[0] = 10.0, 10.0  # the padding is predicted with a loss of 0
    sink, twin = trained(model, steps((x, y)))
    check(sink, twin)
    assert sink.layers("training.tokens", node="c0").matrix[:, 0].tolist() == [24.0, *[0.0] * 7]
    assert sink.layers("training.lengths", node="c0").matrix[:, 4].tolist() == [8.0, *[0.0] * 12]
    assert "train.loss_common" not in sink.names()  # of 300 tokens, all would be


def test_tokens_of_which_the_model_is_certain_count():
    x = torch.full((8, 20), 5)
    model = Language(300)
    with torch.no_grad():
        model.embed.weight[5], model.head.weight[7] = 5.0, 1.0  # p_y is 1 in float32
    sink, twin = trained(model, steps((x, torch.full_like(x, 7))))
    check(sink, twin)
    assert sink.layers("training.lengths", node="c0").matrix[1].tolist() == pytest.approx([160, 0, 0, 160, 8], abs=1e-3)


def test_bands_of_few_targets_or_texts_are_left_out():
    x, y = make_texts(texts=FEWEST_IN_BAND - 1)
    sink, _ = trained(Language(), steps((x, y.clamp(max=15))))
    assert not sink.layers("training.lengths", node="c0").matrix.any()
    assert not sink.layers("training.tokens", node="c0").matrix[1:].any()
    assert sink.layers("training.tokens", node="c0").matrix[0, 0] == (y >= 0).sum()
    assert not {"train.loss_rare", "train.loss_short", "train.loss_long"} & {*sink.names()}


def test_other_losses_are_left_out_with_the_reason():
    def smoothed(z, y):
        return functional.cross_entropy(z, y, label_smoothing=0.1)

    sink, _ = trained(Language(), steps(make_texts(), smoothed))
    check_abstains(sink, "cross-entropy", "soft, mixed or smoothed")
    assert not [r for r in sink.records if getattr(r, "family", "").startswith("training.")]


def test_classes_of_texts_are_no_tokens():
    """A classifier reads tokens, and its outputs are over something else."""
    model = nn.Sequential(
        Language(300, flattened=True), nn.Unflatten(0, (-1, POSITIONS)), nn.Flatten(), nn.LazyLinear(3)
    )
    x = make_texts(vocabulary=300)[0]
    model(x[:1])
    sink, _ = trained(model, steps((x, torch.arange(32) % 3)))
    assert "training.classes" in {getattr(r, "family", "") for r in sink.records}
    assert not {"training.tokens", "training.lengths"} & {getattr(r, "family", "") for r in sink.records}


def test_the_weights_are_the_same_to_the_last_bit():
    data, plainly, model = make_texts(), Language(), Language()
    trained(model, steps(data, accumulate=2))
    steps(data, accumulate=2)(plainly, Twin())
    assert torch.equal(flat(model), flat(plainly))


def test_level_two_tells_the_metrics_and_no_bands():
    sink, _ = trained(Language(), steps(make_texts()), privacy=2)
    assert {"train.loss_common", "train.loss_rare", "train.loss_short"} <= {*sink.names()}
    assert not [r for r in sink.records if getattr(r, "family", "").startswith("training.")]


def test_workers_tell_the_same_and_clients_add_up():
    sinks = []
    for through_worker in (False, True):
        monitor, sink = watched(replace(preset("standard"), training_losses=1))
        with monitor, monitor.round(0):
            for seed in range(2):
                observer = monitor.host.for_worker() if through_worker else monitor
                model = Language()
                with observer.client(f"c{seed}", model):
                    steps(make_texts(seed=seed))(model, Twin())
                if through_worker:
                    monitor.host.absorb(observer.payload())
        sinks.append(sink)
    for family in ("training.tokens", "training.lengths"):
        for sink in sinks:
            own = [sink.layers(family, node=f"c{seed}").matrix for seed in range(2)]
            np.testing.assert_allclose(sink.layers(family, node=None).matrix, sum(own), rtol=1e-5)
        np.testing.assert_allclose(*(sink.layers(family, node="c0").matrix for sink in sinks), rtol=1e-6)


def test_a_device_is_not_waited_for():
    """From the gradients to the sums, which are those of the CPU; limits of bands are on the device, too."""
    x, y = make_texts(16, vocabulary=300)
    rows = Language(300, flattened=True)(x).detach().requires_grad_()
    functional.cross_entropy(rows, y.flatten()).backward()
    logits, gradients = rows.detach(), rows.grad

    def sums(logits, gradients):
        texts = text_rows((gradients.amax(1) > gradients.amin(1)).view(len(x), -1))
        totals = ClassTotals(300, logits.device, language=True)
        totals.add_first(judge_gradients(logits, gradients, texts=texts))
        return totals

    wanted = sums(logits, gradients)
    DeviceTensor.waits.clear()
    with Pretending():
        totals = sums(away(logits), away(gradients))
    assert DeviceTensor.waits.total() == 0
    tables = [ClassSums(own, here(own.numbers).numpy()).tables for own in (totals, wanted)]
    for family in ("training.tokens", "training.lengths"):
        assert tables[0][family].any()
        np.testing.assert_allclose(tables[0][family], tables[1][family])


def hugging_face(**settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=64, pad_token_id=0, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def test_a_model_of_hugging_face():
    """It is given labels by name, moves them itself, and returns its loss."""
    x, y = make_texts()
    labels = torch.cat([torch.full((len(y), 1), IGNORED), y[:, :-1]], 1)  # the model predicts labels[t + 1] at t

    def run(model, twin):
        torch.manual_seed(1)  # of dropout
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for own_x, own_labels in zip(x.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            outputs = model(attention_mask=torch.ones_like(own_x), input_ids=own_x, labels=own_labels)
            twin.logits.append(outputs.logits.detach().double())
            twin.labels.append(torch.cat([own_labels[:, 1:], torch.full((len(own_x), 1), IGNORED)], 1))
            outputs.loss.backward()
            optimizer.step()

    model, plainly = hugging_face(), hugging_face()
    sink, twin = trained(model, run, probes=LOSSES)
    check(sink, twin)
    run(plainly, Twin())
    assert torch.equal(flat(model), flat(plainly))
