# SPDX-License-Identifier: Apache-2.0
"""A small GPT from a configuration, which can be pretrained on the data set's public text."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.data.sources import user_cache
from fedvitals.lab.description import Description, Part, require
from fedvitals.lab.losses import CrossEntropy
from fedvitals.lab.models.blocks import Encoder, PositionEmbedding
from fedvitals.lab.models.description import Shape, require_attention, seeded_globally
from fedvitals.lab.state import StateLayout
from fedvitals.lab.streams import stream


class Pretraining(Part, frozen=True):
    """Training of the first model on public samples, before any client sees it: Adam with a linear decay.

    It depends on its own seed, not the experiment's, so that many experiments start from one pretrained model.
    """

    steps: int = 400
    batch: int = 32
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps of pretraining", self.steps, "at least 1")
        require(self.batch >= 1, "batch of pretraining", self.batch, "at least 1")
        require(self.learning_rate > 0, "learning rate of pretraining", self.learning_rate, "above 0")


class GPT(Description, frozen=True):
    """A decoder-only transformer on tokens, which predicts the next token at each step; without dropout.

    With the defaults and 256 tokens it has 0.39 million weights.

    Args:
        width: The width of the residual stream.
        heads: The number of attention heads in a block.
        layers: The number of blocks.
        pretraining: Steps and settings of a training on the data set's public part before the federation; None:
            none.
    """

    width: int = 96
    heads: int = 4
    layers: int = 3
    pretraining: Pretraining | None = None

    stackable = True

    def __post_init__(self) -> None:
        require_attention("gpt", self.width, self.heads, self.layers)

    def build(
        self,
        shape: Shape,
        classes: int,
        generator: torch.Generator,
        vocabulary: int | None = None,
        *,
        per_step: bool = False,
    ) -> nn.Module:
        if vocabulary is None or not per_step:
            raise ConfigError("The model gpt predicts tokens: take a data set such as text, or token targets per step.")
        with seeded_globally(generator):
            layers: dict[str, nn.Module] = {"embedding": nn.Embedding(vocabulary, self.width)}
            layers["places"] = PositionEmbedding(shape[0], self.width)
            for number in range(1, self.layers + 1):
                layers[f"block{number}"] = Encoder(self.width, self.heads, causal=True)
            layers |= {"norm": nn.LayerNorm(self.width), "head": nn.Linear(self.width, classes, bias=False)}
            return nn.Sequential(OrderedDict(layers))


def pretrain(description: GPT, module: nn.Module, dataset: Dataset) -> None:
    """Load the pretrained weights into the module: from the user's cache, or by training on the public samples."""
    settings = description.pretraining
    if settings is None:
        return
    if dataset.public is None or not dataset.per_step:
        raise ConfigError(f"The data set {dataset.name} has no public text to pretrain on. Leave pretraining out.")
    layout = StateLayout.of(module)
    key = hashlib.sha256(f"{torch.__version__} {dataset.digest} {description!r}".encode()).hexdigest()[:24]
    state = _cached(key)
    if state is None or len(state) != layout.size:
        module.load_state_dict(
            description.build(
                dataset.shape, dataset.outputs[0], stream(settings.seed, "model"), dataset.vocabulary, per_step=True
            ).state_dict()
        )
        _train(module, dataset.public, settings)
        state = layout.flat(module)
        _store(key, state)
    layout.load(module, state)


def _train(module: nn.Module, public: Tensor, settings: Pretraining) -> None:
    optimizer = torch.optim.Adam(module.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.steps)
    loss, generator = CrossEntropy(), stream(settings.seed, "pretraining")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums on every machine
    try:
        for _ in range(settings.steps):
            batch = public[torch.randint(len(public), (settings.batch,), generator=generator)]
            optimizer.zero_grad()
            loss(module(batch[:, :-1]), batch[:, 1:]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=4)
def _cached(key: str) -> Tensor | None:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    try:
        return load_file(user_cache() / "pretrained" / f"{key}.safetensors")["state"]
    except (OSError, ValueError, KeyError):
        return None


def _store(key: str, state: Tensor) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - an extra

    folder = user_cache() / "pretrained"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.{os.getpid()}.partial"
    save_file({"state": state}, partial)
    partial.replace(folder / f"{key}.safetensors")
    _cached.cache_clear()
