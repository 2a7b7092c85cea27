# SPDX-License-Identifier: Apache-2.0
"""The settings of an optimiser when a client's training begins."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

_SETTINGS = {
    "lr": "optimizer.learning_rate",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
}


def optimizer_settings(optimizer: Optimizer) -> dict[str, float | Tensor]:
    """Return learning rate, momentum and weight decay by metric, as far as the optimiser has them.

    They are those of its first group of parameters. The momentum of Adam and its like is their first beta. A setting
    that lies on a device stays there, as a copy, since a schedule may change it in place.
    """
    if not optimizer.param_groups:
        return {}
    group = optimizer.param_groups[0]
    own = {_SETTINGS[name]: group[name] for name in _SETTINGS if name in group}
    betas = group.get("betas")
    if "momentum" not in group and isinstance(betas, tuple | list) and betas:
        own["optimizer.momentum"] = betas[0]
    settings: dict[str, float | Tensor] = {}
    for name, setting in own.items():
        if isinstance(setting, Tensor) and setting.numel() == 1:
            settings[name] = setting.detach().reshape(()).clone() if not setting.is_cpu else float(setting)
        elif isinstance(setting, int | float):
            settings[name] = float(setting)
    return settings
