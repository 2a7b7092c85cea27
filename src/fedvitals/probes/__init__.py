# SPDX-License-Identifier: Apache-2.0
"""From one moment of training to numbers: plain functions of a `View`, each tested against a slow, obvious twin."""

from fedvitals.errors import MissingExtraError

try:
    import torch as torch
except ModuleNotFoundError as error:  # pragma: no cover - asserted on the bare wheel
    raise MissingExtraError("torch", "torch", "Measuring a PyTorch model") from error
