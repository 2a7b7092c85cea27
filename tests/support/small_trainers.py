# SPDX-License-Identifier: Apache-2.0
"""Trainers of tiny models that are made from a configuration: Hugging Face's, and Lightning's."""

import warnings

import lightning.pytorch as pl
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, LENGTH, VOCABULARY, BATCH = 24, 12, 64, 4


def language_model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)
    return transformers.LlamaForCausalLM(config)


def texts(seed=1):
    stream = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=stream)
    return [{"input_ids": row, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": row} for row in rows]


def tune(folder, callbacks, model=None, rows=None, **changes):
    """Train with Hugging Face's Trainer; gives it."""
    settings = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": 1e-2,
        "warmup_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **settings | changes)
    rows = rows or texts()
    model = model or language_model()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)
    trainer.train()
    return trainer


class Classifier(pl.LightningModule):
    """A small network with dropout and a schedule of the learning rate."""

    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.fails_at = fails_at

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _number):
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = functional.cross_entropy(self(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _number):
        logits = self(batch["x"])
        self.log("val_loss", functional.cross_entropy(logits, batch["y"]))
        self.log("val_acc", (logits.argmax(1) == batch["y"]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def samples():
    """A loader of batches that are mappings."""
    stream = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(24, 6, generator=stream), torch.randint(0, 3, (24,), generator=stream))
    return DataLoader([{"x": x, "y": y} for x, y in rows], BATCH)


def fit(callbacks, module=None, package=pl, **changes):
    """Train with Lightning's Trainer; gives it and its module."""
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = module or Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers of loaders
        settings |= {"accelerator": "cpu", "enable_model_summary": False}
        trainer = package.Trainer(callbacks=callbacks, **settings | changes)
        torch.manual_seed(3)
        trainer.fit(module, samples(), samples())
    return trainer, module
