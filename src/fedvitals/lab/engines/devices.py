# SPDX-License-Identifier: Apache-2.0
"""The device and precision that the lab trains with, and the error when the requested GPU is not available."""

from __future__ import annotations

import torch

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.stacked.plans import PRECISIONS

DEVICES = ("cpu", "cuda")


def resolve_device(asked: str | torch.device) -> str:
    """Return the name of an available device, or raise ConfigError."""
    name = str(asked)
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        hint = " An NVIDIA GPU is 'cuda'." if kind.lower() in ("gpu", "nvidia") else ""
        raise ConfigError(f"Unknown device '{name}'. Known: {', '.join(DEVICES)}.{hint}")
    if kind == "cuda":
        require_cuda(f"The device '{name}' was asked for", "Train on 'cpu', or on a machine with an NVIDIA GPU")
    return name


def require_cuda(who: str, instead: str = "Run it on a machine with an NVIDIA GPU") -> None:
    """Raise ConfigError if there is no GPU. `who` begins the sentence (what needs it), `instead` ends it."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{who}, and there is none here: {why_no_cuda()}. {instead} (docs/gpu.md).")


def why_no_cuda() -> str:
    """Return why CUDA is not available, as part of a sentence."""
    version = torch.__version__
    if torch.version.cuda is None:
        return f"PyTorch {version} was built without CUDA (pytorch.org has builds with it)"
    return f"PyTorch {version} has CUDA {torch.version.cuda} and finds no GPU (does `nvidia-smi` list one?)"


def check_precision(precision: str, device: str) -> None:
    """Raise ConfigError unless the precision is known and available on the device."""
    if precision not in PRECISIONS:
        raise ConfigError(unknown("precision", str(precision), PRECISIONS))
    if device == "cpu" and precision != "float32":
        raise ConfigError(f"The precision '{precision}' is for CUDA; on a CPU it is float32. Leave it out here.")
