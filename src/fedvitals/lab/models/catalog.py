# SPDX-License-Identifier: Apache-2.0
"""The models by name, how one is built for a data set, and the operations per sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.description import kind_of
from fedvitals.lab.models.blocks import Heads
from fedvitals.lab.models.description import ModelDescription, Shape, seeded_globally
from fedvitals.lab.models.gpt import GPT, pretrain
from fedvitals.lab.models.images import CNN, PaperCNN, Resnet18
from fedvitals.lab.models.sequences import GRU, LSTM, VIT, Transformer
from fedvitals.lab.models.vectors import MLP, Autoencoder, Logistic


@dataclass(frozen=True)
class Own:
    """A user's own model. Random numbers that it draws from torch come from the experiment's seed.

    Args:
        factory: A function without arguments that returns the module, with one output for each class.
        stackable: Whether the engine «stacked» may compute many copies of it at once.
    """

    factory: Callable[[], nn.Module]
    stackable: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.factory, nn.Module):
            name = type(self.factory).__name__
            raise ConfigError(
                f"lab.Own takes a function that makes the model, not a model: lab.Own(lambda: {name}(...))."
            )

    def __repr__(self) -> str:
        """Identify the factory by its name, which unlike its address is the same in every process."""
        return f"Own({self.factory.__module__}.{getattr(self.factory, '__qualname__', type(self.factory).__name__)})"

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        del shape, classes, vocabulary  # the factory knows
        with seeded_globally(generator):
            module: Any = self.factory()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"The model's factory gave {type(module).__name__}: it must give a torch.nn.Module.")
        return module


MODELS = (PaperCNN, CNN, MLP, Resnet18, Transformer, VIT, LSTM, GRU, GPT, Autoencoder, Logistic)


def build(model: ModelDescription, dataset: Dataset, generator: torch.Generator) -> nn.Module:
    """Return the model for this data set, on the CPU, after testing it on two samples."""
    outputs = dataset.outputs or (dataset.classes,)
    per_step = {"per_step": True} if dataset.per_step and not isinstance(model, Own) else {}
    if per_step and "per_step" not in inspect.signature(model.build).parameters:
        kind = kind_of(type(model).__name__)
        raise ConfigError(f"The model {kind} cannot answer for each step. Take gpt, transformer, lstm or gru.")
    module = model.build(dataset.shape, sum(outputs), generator, vocabulary=dataset.vocabulary, **per_step)
    if len(outputs) > 1 and not isinstance(model, Own):
        module = Heads(module, outputs)
    if isinstance(model, GPT):
        pretrain(model, module, dataset)
    training = module.training
    try:
        with torch.no_grad(), seeded_globally(torch.Generator()):
            answer = module.eval()(dataset.inputs(dataset.x[:2]))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"The model cannot take samples of {dataset.name}, which are {list(dataset.shape)}: {error}"
        ) from error
    finally:
        module.train(training)
    _check_answer(answer, dataset, outputs)
    return module


def _check_answer(answer: Any, dataset: Dataset, outputs: tuple[int, ...]) -> None:
    """Raise ConfigError unless a model's answer for two samples has the shape that the targets need."""
    samples = min(2, len(dataset.x))
    lead = [samples, *dataset.y.shape[1:]] if dataset.per_step else [samples]
    expected = [[*lead, count] for count in outputs]
    parts = list(answer) if isinstance(answer, tuple) else [answer]
    got = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if dataset.targets == "inputs" and isinstance(answer, Tensor):
        got = [[len(answer), answer[0].numel()]]
    if got != expected or (len(outputs) > 1) != isinstance(answer, tuple):
        wanted = str(expected[0]) if len(expected) == 1 else f"a tuple of {expected}"
        shown = str(got[0]) if len(got) == 1 else f"a tuple of {got}"
        raise ConfigError(f"The model answers {shown} for {samples} samples: it must answer {wanted}, as logits.")


def flops(module: nn.Module, sample_shape: Shape, dtype: torch.dtype = torch.float32, *, backward: bool = True) -> int:
    """Return the floating-point operations of one sample's forward and backward pass, in products and convolutions.

    A multiplication and an addition are two operations. Tokens need `dtype=torch.int64`. With `backward=False`, only
    the forward pass counts.
    """
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - imports Triton, where it is installed

    training, weights = module.training, [p for p in module.parameters() if p.requires_grad]
    onednn = torch.backends.mkldnn.enabled
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        try:
            # An LSTM is then made of products that can be counted.
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            answer = module.eval()(torch.zeros(2, *sample_shape, dtype=dtype))  # halved below: some layers refuse one
            if backward:
                total = sum(part.sum() for part in answer) if isinstance(answer, tuple) else answer.sum()
                torch.autograd.grad(total, weights, allow_unused=True)
        finally:
            torch.backends.mkldnn.enabled = onednn
            module.train(training)
    return int(counter.get_total_flops()) // 2
