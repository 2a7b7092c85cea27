# SPDX-License-Identifier: Apache-2.0
"""Where the lab trains, and what is said where the GPU that was asked for is not there."""

from __future__ import annotations

import torch

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.stacked.plans import PRECISIONS

DEVICES = ("cpu", "cuda")


def device_of(asked: str | torch.device) -> str:
    """The name of a device that is there; anything else is refused in words."""
    name = str(asked)
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        hint = " An NVIDIA GPU is 'cuda'." if kind.lower() in ("gpu", "nvidia") else ""
        raise ConfigError(f"Unknown device '{name}'. Known: {', '.join(DEVICES)}.{hint}")
    if kind == "cuda":
        need_cuda(f"The device '{name}' was asked for", "Train on 'cpu', or on a machine with an NVIDIA GPU")
    return name


def need_cuda(who: str, instead: str = "Run it on a machine with an NVIDIA GPU") -> None:
    """Refuses, where there is no GPU to use. `who`: the beginning of the sentence, who wants it; `instead`: its end."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{who}, and there is none here: {why_no_cuda()}. {instead} (docs/gpu.md).")


def why_no_cuda() -> str:
    version = torch.__version__
    if torch.version.cuda is None:
        return f"PyTorch {version} was built without CUDA (pytorch.org has builds with it)"
    return f"PyTorch {version} has CUDA {torch.version.cuda} and finds no GPU (does `nvidia-smi` list one?)"


def check_precision(precision: str, device: str) -> None:
    if precision not in PRECISIONS:
        raise ConfigError(unknown("precision", str(precision), PRECISIONS))
    if device == "cpu" and precision != "float32":
        raise ConfigError(f"The precision '{precision}' is for CUDA; on a CPU it is float32. Leave it out here.")
