# SPDX-License-Identifier: Apache-2.0
"""Tokens, lengths and padding of a client's texts, and its perplexity."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.token_counts import PEAK, PEAK_FLOPS, device_peak, peak_flops
from fedvitals.testing import MemorySink


class Texts(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        if padding is not None:
            self.config = type("Config", (), {"pad_token_id": padding})()

    def forward(self, input_ids, attention_mask=None):
        del attention_mask
        return self.head(self.embedding(input_ids))


def trained(tmp_path, model, batches, **settings):
    """Train one client on batches of keyword arguments; returns its metrics."""
    sink = MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True, **settings)
    with monitor.round(0), monitor.client("c0", model):
        for batch in batches:
            optimizer.zero_grad()
            logits, mask = model(**batch)[:, :-1], batch.get("attention_mask")
            targets = batch["input_ids"][:, 1:]
            targets = targets if mask is None else targets.masked_fill(mask[:, 1:] == 0, -100)
            nn.functional.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1)).backward()
            optimizer.step()
        with torch.no_grad():
            model(**batches[0])  # an evaluation is no training
    monitor.close()
    return {record.name: record.value for record in sink.metrics(node="c0")}


def test_tokens_and_padding_are_those_of_the_mask(tmp_path):
    tokens = torch.randint(1, 11, (2, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    short = {"input_ids": tokens[:, :3], "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    metrics = trained(tmp_path, Texts(), [{"input_ids": tokens, "attention_mask": mask}, short])
    assert metrics["tokens"] == 10
    assert metrics["tokens.length"] == pytest.approx(10 / 4)
    assert metrics["tokens.padding"] == pytest.approx(4 / 14)
    assert metrics["tokens.full"] == pytest.approx(1 / 4)  # of the widest batch, one text has no padding
    assert metrics["throughput.tokens"] > 0
    assert "model.flops_utilisation" not in metrics  # the peak of a CPU is not known


def test_padding_by_the_models_own_token_and_none_where_that_is_unknown(tmp_path):
    tokens = torch.tensor([[3, 4, 0, 0], [3, 4, 5, 6]])
    assert trained(tmp_path, Texts(padding=0), [{"input_ids": tokens}])["tokens"] == 6
    metrics = trained(tmp_path, Texts(), [{"input_ids": tokens}])
    assert metrics["tokens"] == 8
    assert "tokens.padding" not in metrics


def test_perplexity_is_that_of_the_training_loss(tmp_path):
    tokens = torch.randint(1, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    metrics = trained(tmp_path, Texts(), [{"input_ids": tokens}] * 3)
    assert metrics["perplexity.before"] == pytest.approx(math.exp(metrics["train.loss_first"]))


class WithLoss(Texts):
    """Returns its loss, as models of Hugging Face do: a mean over the targets, or their sum over so many."""

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits, targets = super().forward(input_ids), labels[:, 1:].flatten()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction=reduction)
        return SimpleNamespace(loss=loss / (num_items_in_batch or 1), logits=logits)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_returned_loss_gives_perplexities_in_every_round(tmp_path, accumulated):
    """Of the first and the last eighth of 16 passes, in which texts have different lengths."""
    stream, model, sink = torch.Generator().manual_seed(0), WithLoss(), MemorySink()
    optimizer, expected = torch.optim.SGD(model.parameters(), 0.5), {}
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor:
        for number in range(3):
            losses = []
            with monitor.round(number), monitor.client("c0", model):
                for place in range(16):
                    text = torch.randint(0, 11, (2, 4 + place % 3), generator=stream)
                    labels = text.masked_fill(torch.rand(text.shape, generator=stream) < 0.2, -100)
                    count = int((labels[:, 1:] != -100).sum())
                    items = {"num_items_in_batch": count + 5} if accumulated else {}
                    optimizer.zero_grad()
                    loss = model(input_ids=text, labels=labels, **items).loss
                    losses.append((loss.item() * (count + 5 if accumulated else count), count))
                    loss.backward()
                    optimizer.step()
            for when, own in (("before", losses[:2]), ("after", losses[-2:])):
                sums, counts = zip(*own, strict=True)
                expected[number, when] = pytest.approx(math.exp(sum(sums) / sum(counts)), rel=1e-5)
    for (number, when), perplexity in expected.items():
        assert sink.value(f"perplexity.{when}", round=number, node="c0") == perplexity


def test_a_mean_is_taken_as_one_where_a_model_ignores_the_number_of_items(tmp_path):
    """As T5 does of Hugging Face: its trainer passes the number, of all batches of a step, to every model."""

    class Mean(WithLoss):
        loss_function = None

        def forward(self, input_ids, labels, **_):
            return super().forward(input_ids, labels)

    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    model, sink = Mean(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor, monitor.round(0), monitor.client("c0", model):
        loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=160).loss
        loss.backward()
        optimizer.step()
    assert sink.value("perplexity.before", node="c0") == pytest.approx(math.exp(loss.item()), rel=1e-5)


class Classifier(nn.Module):
    """Texts to one of so many classes; token types have as many rows as a transformer's."""

    def __init__(self, classes, vocabulary=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, classes)
        if vocabulary is not None:
            self.types, self.config = nn.Embedding(2, 8), type("Config", (), {"vocab_size": vocabulary})()

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids).mean(1))


@pytest.mark.parametrize(("classes", "vocabulary", "expected"), [(4, None, False), (2, 11, False), (11, 11, True)])
def test_perplexity_is_only_told_where_tokens_are_predicted(tmp_path, classes, vocabulary, expected):
    """A text classifier reads tokens, too, but its loss is of classes; that of the next token, after a text, is."""
    model, sink = Classifier(classes, vocabulary), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for _ in range(3):
            optimizer.zero_grad()
            text = torch.randint(0, 11, (8, 5))
            nn.functional.cross_entropy(model(text), text[:, 0] % classes).backward()
            optimizer.step()
    assert sink.value("tokens", node="c0") == 3 * 8 * 5
    assert ("perplexity.before" in sink.names()) == expected


def test_utilisation_of_a_peak_that_is_declared(tmp_path, monkeypatch):
    """Six operations for each of the 8 · 11 weights that are multiplied; the embedding is only looked up."""
    monkeypatch.setenv(PEAK, "1e6")
    tokens = torch.randint(1, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    metrics = trained(tmp_path, Texts(), [{"input_ids": tokens}])
    assert metrics["model.flops_utilisation"] == pytest.approx(metrics["throughput.tokens"] * 6 * 8 * 11 / 1e6)


@pytest.mark.parametrize("declared", ["fast", "0", "-1"])
def test_a_peak_that_is_no_number_is_ignored(monkeypatch, caplog, declared):
    monkeypatch.setenv(PEAK, declared)
    assert device_peak(torch.device("cpu")) is None
    assert PEAK in caplog.text


def test_a_model_without_texts_has_no_tokens(tmp_path):
    model, sink = nn.Linear(4, 2), MemorySink()
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monitor.round(0), monitor.client("c0", model):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    monitor.close()
    assert not [name for name in sink.names() if "token" in name or "perplexity" in name]


def test_the_peak_of_a_gpu_is_known_by_its_name():
    assert peak_flops("NVIDIA H200") == PEAK_FLOPS["H200"]
    assert peak_flops("NVIDIA H100 PCIe") < peak_flops("NVIDIA H100 80GB HBM3")
    assert peak_flops("Some other GPU") is None
