# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model train and travel, which are frozen, and which stay at clients' homes."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.adapters import Adapters, insert_adapters, matches
from fedvitals.lab.description import Part, require
from fedvitals.lab.state import StateLayout

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment


class Parameters(Part, frozen=True):
    """Patterns of tensors' names, such as "embedding.*", that say which of them are trained and which are sent. Tensors
    that no pattern names are trained and sent.

    Args:
        frozen: Parameters that keep their initial values and are never sent; with `adapters`, these are all of the
            model's own.
        trained: Exceptions from that.
        at_home: Tensors that each client trains and never sends: a head of its own, or (FedBN, Li et al. 2021) the
            batch norm with its statistics.
        adapters: `lab.Lora` or `lab.Bottleneck`; None: none.
    """

    frozen: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    at_home: tuple[str, ...] = ()
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        if self.adapters is not None and self.frozen:
            raise ConfigError(
                "With adapters all of the model's own parameters are frozen: leave `frozen` out, and name in `trained` "
                "what trains beside them."
            )

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigError if the experiment cannot be run with such parameters."""
        if self.adapters is not None:
            self.adapters.check(experiment)
        if self.at_home:
            local = experiment.evaluation.local and experiment.test_share > 0
            require(
                local, "local evaluation", "off", "on (evaluation.local, test_share above 0): the server has no whole "
                "model that it could test when parts stay at home",
            )  # fmt: skip

    def prepare(self, module: nn.Module, generator: torch.Generator) -> tuple[StateLayout, StateLayout | None]:
        """Freeze the module's parameters and insert its adapters, in place.

        Returns the layout of what trains and travels, and that of what stays at home, if anything.
        """
        own = dict(module.named_parameters())
        tensors = [*own, *(name for name, _ in module.named_buffers())]
        for pattern in (*self.frozen, *self.trained, *self.at_home):
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise ConfigError(f"No tensor of the model is called '{pattern}'. Known: {', '.join(tensors)}.")
        home = [name for name in tensors if matches(name, self.at_home)]
        frozen = self.frozen if self.adapters is None else ("*",)
        for name, parameter in own.items():
            parameter.requires_grad_(not matches(name, frozen) or matches(name, (*self.trained, *self.at_home)))
        if self.adapters is not None:
            insert_adapters(module, self.adapters, generator)
            _require_frozen(module)
        if not any(p.requires_grad for name, p in module.named_parameters() if name not in home):
            raise ConfigError("Nothing of this model would train and travel: freeze less, or leave less at home.")
        return StateLayout.of(module, without=home), StateLayout.of(module, only=home) if home else None


def _require_frozen(module: nn.Module) -> None:
    """Raise ConfigError if a layer with an adapter would itself train."""
    names = [name for name, p in module.named_parameters() if ".base_layer." in f".{name}" and p.requires_grad]
    if names:
        raise ConfigError(
            f"'{names[0].replace('base_layer.', '')}' has an adapter, so it cannot be in `trained` or `at_home`."
        )
