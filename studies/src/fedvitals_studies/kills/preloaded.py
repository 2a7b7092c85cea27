# SPDX-License-Identifier: Apache-2.0
"""Imports and compiles once, in the process that all others are forked from, what a trainer needs in its first round.

It starts no thread: a fork would lack it.
"""

import torch
from torch import nn

import fedvitals_studies.kills.trainer  # noqa: F401
from fedvitals.kernels import count_sketch, sums

torch.set_num_threads(1)
_model = nn.Linear(8, 3)
_optimizer = torch.optim.SGD(_model.parameters(), 0.1)
_model(torch.zeros(4, 8)).sum().backward()
_optimizer.step()
count_sketch(torch.zeros(8))
sums([torch.zeros(8)])
