# SPDX-License-Identifier: Apache-2.0
"""One optimiser step of many clients in one pass: gradients, moments and weights are read and written once.

Everything that depends on the step, and whether a client takes it, is in a table on the device, written before the
round; a counter on the device selects its row. So one captured graph of the step serves every step of every round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

RATE, SCALE, ACTIVE = range(3)  # columns of the table [steps, clients, 3]
SIZE, WARPS = 4096, 8


@triton.jit
def _step(
    states, gradients, first, second, table, counter, clients, weights, row, beta1, beta2, rest1, rest2, epsilon, decay,
    KIND: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    line = table + (tl.load(counter) * clients + client) * 3
    if tl.load(line + 2) == 0:
        return
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < weights
    own = client * weights + i
    rate = tl.load(line)
    at = states + client * row + i
    gradient = tl.load(gradients + own, mask=there)
    state = tl.load(at, mask=there)
    if DECAYS:
        gradient += decay * state
    if KIND == "adam":
        m = tl.load(first + own, mask=there)
        v = tl.load(second + own, mask=there)
        m += (gradient - m) * rest1
        v = v * beta2 + gradient * gradient * rest2
        tl.store(first + own, m, mask=there)
        tl.store(second + own, v, mask=there)
        state -= rate * (m / (tl.sqrt_rn(v) * tl.load(line + 1) + epsilon))
    if KIND == "momentum":
        m = tl.load(first + own, mask=there) * beta1 + gradient
        tl.store(first + own, m, mask=there)
        state -= rate * m
    if KIND == "sgd":
        state -= rate * gradient
    tl.store(at, state, mask=there)


@triton.jit
def _scale(matrix, factors, layer_of, weights, layers, SIZE: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < weights
    at = matrix + client * weights + i
    factor = tl.load(factors + client * layers + tl.load(layer_of + i, mask=there, other=0), mask=there)
    tl.store(at, tl.load(at, mask=there) * factor, mask=there)


def scale(matrix: Tensor, factors: Tensor, layer_of: Tensor) -> None:
    """Multiply [clients, weights] by [clients, layers] in place; `layer_of` is each weight's layer, int32."""
    clients, weights = matrix.shape
    grid = (triton.cdiv(weights, SIZE), clients)
    _scale[grid](matrix, factors, layer_of, weights, factors.shape[1], SIZE, num_warps=WARPS)


def step(
    kind: str,
    states: Tensor,
    gradients: Tensor,
    moments: list[Tensor],
    table: Tensor,
    counter: Tensor,
    betas: tuple[float, float] = (0.0, 0.0),
    epsilon: float = 0.0,
    decay: float = 0.0,
) -> None:
    """Apply «sgd», «momentum» or «adam» to [clients, weights] in place; `states` may have longer rows.

    `decay` times the weights is added to the gradients that are applied.

    The table's columns: the rate, divided by Adam's first correction; one over the root of its second; whether the
    client takes this step at all.
    """
    clients, weights = gradients.shape
    first, second = (*moments, gradients, gradients)[:2]
    _step[(triton.cdiv(weights, SIZE), clients)](
        states, gradients, first, second, table, counter, clients, weights, states.stride(0),
        *betas, 1 - betas[0], 1 - betas[1], epsilon, decay,  # 1 − β here: in float32 it would lose its last digits
        kind, decay != 0, SIZE, num_warps=WARPS,
    )  # fmt: skip
