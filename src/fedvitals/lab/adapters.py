# SPDX-License-Identifier: Apache-2.0
"""Adapters: small layers beside the frozen dense layers of a model, which alone train and travel.

| kind | a dense layer's output y = W x + b becomes |
| --- | --- |
| lora | y + α/r · B A x, with A [r, in] and B [out, r] (Hu et al. 2021) |
| bottleneck | y + U gelu(D y), with D [width, out] and U [out, width] (Houlsby et al. 2019) |

B and U begin at 0, so that a model with adapters begins as the model without. Tensors are named as in peft's files:
`mix.lora_A.weight`; the layer itself is `mix.base_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, kind_of, require
from fedvitals.lab.models.description import seeded_globally

if TYPE_CHECKING:
    from fedvitals.lab.engines.tasks import Node
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.state import StateLayout

EXACT = "exact"
PARTITIONED = "rank_partitioned"
A, B, RESIDUAL = "lora_A.weight", "lora_B.weight", "residual"


class Lora(Description, frozen=True):
    """Low-rank adapters of dense layers: y = W x + α/r · B A x.

    A client of a lower rank receives and trains the first rows of A and columns of B, and what it lacks counts as 0.
    Its α/r is the experiment's, unless `alphas` names its α.

    Args:
        rank: r, the rank of B A.
        alpha: α; the adapter's output is multiplied by α/r.
        targets: Patterns of the names of the layers that get one.
        ranks: The ranks of single clients.
        alphas: The α of single clients.
        aggregation: «zero_padded»: A and B are averaged as they are; «rank_partitioned»: each of the r directions is
            averaged over the clients that have it; «exact»: as the mean of products is not the product of means, the
            server adds the difference to the frozen weight (FedEx-LoRA, Singhal et al. 2024).
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)
    ranks: dict[str, int] = msgspec.field(default_factory=dict)
    alphas: dict[str, float] = msgspec.field(default_factory=dict)
    aggregation: Literal["zero_padded", "rank_partitioned", "exact"] = "zero_padded"

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.ranks.values()):
            require(rank >= 1, "rank of lora", rank, "at least 1")
        for alpha in (self.alpha, *self.alphas.values()):
            require(alpha > 0, "alpha of lora", alpha, "above 0")

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigError if the experiment cannot aggregate these adapters, or has no such clients."""
        for node in (*self.ranks, *self.alphas):
            require(node in experiment.nodes, "client of lora", node, f"one of c0 to {experiment.nodes[-1]}")
        topology = kind_of(type(experiment.topology).__name__)
        if self.ranks and topology in ("hierarchical", "rings", "ring_stars", "ring"):
            raise ConfigError(
                f"With the topology {topology} clients continue each other's models, so that they need one rank. Leave "
                "ranks out of lora, or take the topology centralized."
            )
        if self.ranks and hasattr(experiment.aggregator, "sends_vectors"):
            raise ConfigError("The aggregators scaffold and feddyn shift all gradients, so that clients need one rank.")
        unseen = experiment.privacy is not None or experiment.secure_aggregation is not None
        if unseen and (self.ranks or self.aggregation != "zero_padded"):
            raise ConfigError(
                "With privacy or secure_aggregation the server has no single client's adapters: leave ranks out of "
                "lora, and take its aggregation zero_padded."
            )
        aggregator = kind_of(type(experiment.aggregator).__name__)
        plain = aggregator == "fedavg" and experiment.aggregator.server_learning_rate == 1
        if self.aggregation != "zero_padded" and not (plain and topology == "centralized"):
            raise ConfigError(
                f"The aggregation {self.aggregation} of lora is a rule of its own for the aggregator fedavg with rate "
                f"1 and the topology centralized; got {aggregator} and {topology}. Take zero_padded with these."
            )

    @property
    def full_rank(self) -> int:
        """The rank of the global adapters."""
        return max((self.rank, *self.ranks.values()))

    def rank_of(self, node: Node) -> int:
        return self.ranks.get(node, self.rank)

    def scale_of(self, node: Node | None = None) -> float:
        """Return α/r of a client, or of the server's model."""
        if node is None or node not in self.alphas:
            return self.alpha / self.rank
        return self.alphas[node] / self.rank_of(node)

    def adapt(self, layer: nn.Linear) -> nn.Module:
        return LoraLinear(layer, self.full_rank, self.scale_of(), exact=self.aggregation == EXACT)

    def held(self, layout: StateLayout, rank: int) -> Tensor:
        """Return which numbers of a state a client of this rank has, [size]."""
        held = torch.ones(layout.size, dtype=torch.bool)
        for name, view in layout.views(held).items():
            if name.endswith(A):
                view[rank:] = False
            elif name.endswith(B):
                view[:, rank:] = False
        return held


class Bottleneck(Description, frozen=True):
    """Adapters: two small dense layers with a skip connection after each dense layer whose name matches.

    Args:
        width: The width between the two layers.
        targets: Patterns of the layers' names.
    """

    width: int = 8
    targets: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        require(self.width >= 1, "width of bottleneck", self.width, "at least 1")

    def check(self, experiment: Experiment) -> None:
        """Accept any experiment."""

    def adapt(self, layer: nn.Linear) -> nn.Module:
        return BottleneckLinear(layer, self.width)


Adapters = Lora | Bottleneck
ADAPTERS = (Lora, Bottleneck)


class LoraLinear(nn.Module):
    """A dense layer with a low-rank adapter. `scale` is α/r; `residual` is what exact aggregation has added to W."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, *, exact: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scale = layer, scale
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)  # drawn as peft does: Kaiming's uniform
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.residual: Tensor | None
        self.register_buffer(RESIDUAL, torch.zeros_like(layer.weight) if exact else None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))
        return y if self.residual is None else y + F.linear(x, self.residual)  # type: ignore[no-any-return]

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the weight of the dense layer that computes the same."""
        merged = self.base_layer.weight + self.scale * self.lora_B.weight @ self.lora_A.weight
        return merged if self.residual is None else merged + self.residual


class BottleneckLinear(nn.Module):
    """A dense layer with a bottleneck adapter behind it."""

    def __init__(self, layer: nn.Linear, width: int) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.out_features, width)
        self.up = nn.Linear(width, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y + self.up(F.gelu(self.down(y)))  # type: ignore[no-any-return]


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def insert_adapters(module: nn.Module, adapters: Adapters, generator: torch.Generator) -> None:
    """Replace the module's dense layers that the adapters are meant for, in place."""
    dense = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    for pattern in adapters.targets or ("",):
        if not any(fnmatchcase(name, pattern) for name in dense):
            known = ", ".join(dense) or "none"
            raise ConfigError(f"No dense layer is called '{pattern}', for adapters. Known: {known}.")
    with seeded_globally(generator):
        for name in dense:
            if matches(name, adapters.targets):
                parent, _, last = name.rpartition(".")
                holder = module.get_submodule(parent)
                layer = holder.get_submodule(last)
                assert isinstance(layer, nn.Linear)  # noqa: S101 - chosen above
                setattr(holder, last, adapters.adapt(layer))


def set_scale(module: nn.Module, scale: float) -> None:
    """Set the α/r of all low-rank adapters of a module."""
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.scale = scale
