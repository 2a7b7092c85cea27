# SPDX-License-Identifier: Apache-2.0
"""The model of the study's jobs; NVFlare copies this file into them, so it imports nothing of ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DigitsModel(nn.Module):
    """A small network for digits of 8 x 8 pixels, initialised from a seed: NVFlare's server creates it again."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
