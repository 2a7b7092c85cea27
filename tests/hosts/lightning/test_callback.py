# SPDX-License-Identifier: Apache-2.0
"""`fv.lightning.Callback` in a real Lightning Trainer, alone and inside of a federation."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.records import Run
from fedvitals.scope import current
from fedvitals.testing import MemorySink
from support.hooks import hooks_left

pl = pytest.importorskip("lightning.pytorch")


class Classifier(pl.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.fails_at = fails_at

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = functional.cross_entropy(self(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        logits = self(batch["x"])
        self.log("val_loss", functional.cross_entropy(logits, batch["y"]))
        self.log("val_acc", (logits.argmax(1) == batch["y"]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader():
    stream = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(24, 6, generator=stream), torch.randint(0, 3, (24,), generator=stream))
    return DataLoader([{"x": x, "y": y} for x, y in rows], 4)


def fit(callbacks, module=None, **changes):
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = module or Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers of loaders
        trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, callbacks=callbacks, **settings | changes)
        torch.manual_seed(3)
        trainer.fit(module, loader(), loader())
    return trainer, module


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


def test_it_goes_to_processes_that_a_trainer_starts():
    again = pickle.loads(pickle.dumps(fv.lightning.Callback("one.db", client="a", steps=3)))
    assert again._watch.steps == 3


def test_the_other_package_of_lightning():
    other = pytest.importorskip("pytorch_lightning")
    callback, sink = watched()

    class Same(other.LightningModule):
        __init__, forward, training_step = Classifier.__init__, Classifier.forward, Classifier.training_step
        configure_optimizers = Classifier.configure_optimizers

    Same.__init__ = lambda self: (other.LightningModule.__init__(self), setattr(self, "net", nn.Linear(6, 3)))[0]
    Same.fails_at = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = other.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(Same(), loader())
    assert sink.value("steps") == 6
