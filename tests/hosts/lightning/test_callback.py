# SPDX-License-Identifier: Apache-2.0
"""`fv.lightning.Callback` in a real Lightning Trainer, alone and inside of a federation."""

import pickle

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.records import Run
from fedvitals.scope import current
from fedvitals.testing import MemorySink
from support.hooks import hooks_left

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'fedvitals[lightning]'")
pytest.importorskip("transformers")

from support.small_trainers import VOCABULARY, Classifier, fit, language_model


def watched():
    sink = MemorySink()
    return fv.lightning.Callback(None, sinks=[sink], strict=True), sink


def test_a_training_of_its_own():
    """Epochs are rounds of one client; losses are its own, validations the model's; the run ends with the training."""
    callback, sink = watched()
    trainer, module = fit([callback])
    assert [m.value for m in sink.metrics("steps", node="model")] == [6, 6]
    assert sink.value("loss", round=1, node="model") == pytest.approx(float(trainer.callback_metrics["train_loss"]))
    validated = [m.value for m in sink.metrics("loss") if m.where.node is None]
    assert len(validated) == 2
    assert validated[1] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert len([m for m in sink.metrics("accuracy") if m.where.node is None]) == 2
    assert sink.value("gradient.norm", round=1, node="model") > 0
    assert sink.value("optimizer.learning_rate", round=1, node="model") == pytest.approx(0.001)
    assert sink.of(Run)[-1].finished
    assert not hooks_left(module, *trainer.optimizers)
    assert current.get() is None


CASES = {
    "plain": ({}, [6, 6]),
    "accumulation": ({"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, [2, 2]),
    "bfloat16": ({"precision": "bf16-mixed"}, [6, 6]),
    "validations": ({"val_check_interval": 3}, [3, 3, 3, 3]),
    "no validation": ({"limit_val_batches": 0}, [6, 6]),
}


@pytest.mark.parametrize("case", CASES)
def test_watching_changes_no_bits(case):
    changes, steps = CASES[case]
    _, plain = fit([], **changes)
    callback, sink = watched()
    _, module = fit([callback], **changes)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))
    assert [m.value for m in sink.metrics("steps")] == steps
    assert sink.metrics("loss", node="model")
    assert not [e for e in sink.events() if e.name.startswith("monitor")]


@pytest.mark.parametrize("opened", ["with its model", "without a model", "by the callback"])
def test_inside_of_a_plain_federation(opened):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0, Classifier()):
        for name in ("a", "b"):
            module = Classifier()
            if opened == "by the callback":
                fit([fv.lightning.Callback(monitor, client=name)], module)
                continue
            with monitor.client(name, module if opened == "with its model" else None):
                fit([fv.lightning.Callback(monitor)], module)
    for name in ("a", "b"):
        assert sink.value("steps", node=name) == 12
        assert sink.value("loss", node=name) > 0
        assert sink.value("user.val_loss", node=name) > 0
        assert sink.value("update.norm", node=name) > 0


def test_a_training_that_fails_is_reported():
    callback, sink = watched()
    module = Classifier(fails_at=8)
    with pytest.raises(ZeroDivisionError):
        fit([callback], module)
    assert [e.where.round for e in sink.events("client.failed")] == [1]
    assert sink.of(Run)[-1].finished
    assert not hooks_left(module)


def test_errors_of_ours_do_not_stop_the_training(monkeypatch, caplog):
    from fedvitals.hosts.loop.model_run import ModelRun

    monkeypatch.setattr(ModelRun, "begin", lambda _: 1 / 0)
    callback, _ = watched()
    trainer, _ = fit([callback])
    assert trainer.global_step == 12


class Generator(pl.LightningModule):
    """A language model, whose step calls the module, or its only part."""

    def __init__(self, called):
        super().__init__()
        self.model, self.called = language_model(), called

    def forward(self, rows):
        return self.model(input_ids=rows, labels=rows)

    def training_step(self, batch, _number):
        rows = (batch["x"] * 10).long().clamp(0, VOCABULARY - 1)
        return (self(rows) if self.called == "module" else self.model(input_ids=rows, labels=rows)).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_a_step_may_call_the_modules_only_part_instead_of_the_module():
    def measured(called):
        callback, sink = watched()
        _, module = fit([callback], Generator(called), limit_val_batches=0)
        assert not hooks_left(module)
        names = "tokens", "tokens.length", "perplexity.before", "perplexity.after", "train.loss_first", "batch.size"
        return [m.value for name in names for m in sink.metrics(name, node="model")]

    assert measured("part") == measured("module")
    assert measured("part")[:2] == [24 * 6] * 2


def test_it_goes_to_processes_that_a_trainer_starts():
    again = pickle.loads(pickle.dumps(fv.lightning.Callback("one.db", client="a", steps=3)))
    assert again._watch.steps == 3


def test_the_other_package_of_lightning():
    other = pytest.importorskip("pytorch_lightning")
    callback, sink = watched()

    class Same(other.LightningModule):
        __init__, fails_at = other.LightningModule.__init__, None
        forward, training_step, validation_step = (
            Classifier.forward,
            Classifier.training_step,
            Classifier.validation_step,
        )
        configure_optimizers = Classifier.configure_optimizers

    module = Same()
    module.net = nn.Linear(6, 3)
    fit([callback], module, other)
    assert [m.value for m in sink.metrics("steps")] == [6, 6]
