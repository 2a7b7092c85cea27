# SPDX-License-Identifier: Apache-2.0
"""Convolution, pooling (if any) and activation of many clients at once, each with its own weights, by Triton on CUDA.

cuDNN computes stacked clients as a grouped convolution, one group per client, at a tenth of the machine's speed. This
block, of which small image networks consist, is one pass instead: an implicit matrix product per client, of which only
the pooled and activated output is written. The backward pass never writes the full-size gradient either: a quarter of
it are numbers at positions that the forward pass has recorded, the rest zeros.

Tensors are channels last: images [clients, samples, height, width, channels].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LINEAR, LEAKY, TANH = 0, 1, 2
_LARGEST = (1 << 31) - 1  # place within a client's part: the kernels count in 32 bits there


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """A convolution of stride 1, a pooling of `pool` × `pool`, 2 or 1, and an activation: `kind`, its slope below 0."""

    kernel: int
    padding: int
    kind: int = LINEAR
    slope: float = 0.0
    pool: int = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of the work: rows (of pooled positions or inputs) and terms per tile, warps, pipeline stages."""

    rows: int
    terms: int
    warps: int
    stages: int
    parts: int = 1  # of the sum over all places, where weights are differentiated


# The quickest of a few on an H200, for the paper's two convolutions with 100 clients.
FORWARD, INPUTS, WEIGHTS = Tiles(32, 32, 4, 3), Tiles(64, 64, 4, 1), Tiles(32, 32, 4, 3, 4)
UNPOOLED = Tiles(128, 32, 4, 3)  # forward
FOLDED = 1024  # values that one program adds up


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _tanh(x):
    """Compute tanh by exp of a non-positive number, which cannot overflow; near 0, where that cancels, by its
    series.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -size, size)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.0625, series, far)


@triton.jit
def _patches(
    x, n, oh, ow, k, there, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr
):
    """Load [rows, terms]: the part of the images that the kernel covers at these positions."""
    kh = k // (KS * CI)
    kw = (k // CI) % KS
    ci = k % CI
    ih = oh[:, None] + kh[None, :] - PAD
    iw = ow[:, None] + kw[None, :] - PAD
    inside = there[:, None] & (k < KS * KS * CI)[None, :]
    if PAD > 0:
        inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
    return tl.load(x + ((n[:, None] * H + ih) * W + iw) * CI + ci[None, :], mask=inside, other=0.0)


@triton.jit
def _forward(
    x, w, bias, y, places, samples, slope,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = p // (PH * PW)
    top = (p // PW) % PH * POOL
    left = p % PW * POOL
    there = n < samples
    co = tl.arange(0, OUT)
    x += client * samples * (H * W * CI)
    w += client * (KS * KS * CI * CO)
    acc0 = tl.zeros((ROWS, OUT), tl.float32)
    acc1 = tl.zeros((ROWS, OUT), tl.float32)
    acc2 = tl.zeros((ROWS, OUT), tl.float32)
    acc3 = tl.zeros((ROWS, OUT), tl.float32)
    for first in range(0, KS * KS * CI, TERMS):
        k = first + tl.arange(0, TERMS)
        b = tl.load(w + k[:, None] * CO + co[None, :], mask=(k < KS * KS * CI)[:, None] & (co < CO)[None, :], other=0.0)
        acc0 = _product(_patches(x, n, top, left, k, there, H, W, CI, KS, PAD), b, acc0, PRECISION)
        if POOL == 2:
            acc1 = _product(_patches(x, n, top, left + 1, k, there, H, W, CI, KS, PAD), b, acc1, PRECISION)
            acc2 = _product(_patches(x, n, top + 1, left, k, there, H, W, CI, KS, PAD), b, acc2, PRECISION)
            acc3 = _product(_patches(x, n, top + 1, left + 1, k, there, H, W, CI, KS, PAD), b, acc3, PRECISION)
    best = acc0
    place = tl.zeros((ROWS, OUT), tl.int32)
    if POOL == 2:  # as torch pools: the first of equals, and NaN before all
        taken = (acc1 > best) | (acc1 != acc1)  # noqa: PLR0124 - NaN
        best, place = tl.where(taken, acc1, best), tl.where(taken, 1, place)
        taken = (acc2 > best) | (acc2 != acc2)  # noqa: PLR0124 - NaN
        best, place = tl.where(taken, acc2, best), tl.where(taken, 2, place)
        taken = (acc3 > best) | (acc3 != acc3)  # noqa: PLR0124 - NaN
        best, place = tl.where(taken, acc3, best), tl.where(taken, 3, place)
    best += tl.load(bias + client * CO + co, mask=co < CO, other=0.0)[None, :]
    if KIND == 1:
        best = tl.where(best > 0, best, best * slope)
    if KIND == 2:
        best = _tanh(best)
    into = client * samples * (PH * PW * CO) + p[:, None] * CO + co[None, :]
    kept = there[:, None] & (co < CO)[None, :]
    tl.store(y + into, best, mask=kept)
    if POOL == 2:
        tl.store(places + into, place.to(tl.int8), mask=kept)


@triton.jit
def _activation_gradient(dy, y, g, slope, total, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Compute the gradient before the activation from the one after it and the activation's output."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = i < total
    gradient = tl.load(dy + i, mask=there, other=0.0)
    if KIND == 1:
        gradient = tl.where(tl.load(y + i, mask=there, other=0.0) > 0, gradient, gradient * slope)
    if KIND == 2:
        answer = tl.load(y + i, mask=there, other=0.0)
        gradient = gradient * (1.0 - answer * answer)
    tl.store(g + i, gradient, mask=there)


@triton.jit
def _weights(
    x, g, places, dw, samples,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Compute [CO, terms] of the weight gradient for one part of the positions."""
    client = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    k = tl.program_id(0) * TERMS + tl.arange(0, TERMS)
    co = tl.arange(0, OUT)
    x += client * samples * (H * W * CI)
    g += client * samples * (PH * PW * CO)
    places += client * samples * (PH * PW * CO)
    acc = tl.zeros((OUT, TERMS), tl.float32)
    for first in range(0, EACH, ROWS):
        p = part * EACH + first + tl.arange(0, ROWS)
        n = p // (PH * PW)
        top = (p // PW) % PH * POOL
        left = p % PW * POOL
        there = n < samples
        into = p[None, :] * CO + co[:, None]
        kept = there[None, :] & (co < CO)[:, None]
        gradient = tl.load(g + into, mask=kept, other=0.0)
        a = _patches(x, n, top, left, k, there, H, W, CI, KS, PAD)
        if POOL == 1:
            acc = _product(gradient, a, acc, PRECISION)
        else:
            place = tl.load(places + into, mask=kept, other=0)
            acc = _product(tl.where(place == 0, gradient, 0.0), a, acc, PRECISION)
            a = _patches(x, n, top, left + 1, k, there, H, W, CI, KS, PAD)
            acc = _product(tl.where(place == 1, gradient, 0.0), a, acc, PRECISION)
            a = _patches(x, n, top + 1, left, k, there, H, W, CI, KS, PAD)
            acc = _product(tl.where(place == 2, gradient, 0.0), a, acc, PRECISION)
            a = _patches(x, n, top + 1, left + 1, k, there, H, W, CI, KS, PAD)
            acc = _product(tl.where(place == 3, gradient, 0.0), a, acc, PRECISION)
    into = ((client * PARTS + part) * CO + co[:, None]) * (KS * KS * CI) + k[None, :]
    tl.store(dw + into, acc, mask=(co < CO)[:, None] & (k < KS * KS * CI)[None, :])


@triton.jit
def _columns(
    g, places, w, columns, samples,
    CO: tl.constexpr, TAPS: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Compute each position's contribution to all inputs that its kernel covers: [samples, POOL PH, POOL PW, taps]."""
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * TERMS + tl.arange(0, TERMS)
    n = p // (PH * PW)
    top = (p // PW) % PH * POOL
    left = p % PW * POOL
    there = n < samples
    co = tl.arange(0, OUT)
    from_ = client * samples * (PH * PW * CO) + p[:, None] * CO + co[None, :]
    kept = there[:, None] & (co < CO)[None, :]
    gradient = tl.load(g + from_, mask=kept, other=0.0)
    place = tl.load(places + from_, mask=kept, other=4) if POOL == 2 else tl.zeros((ROWS, OUT), tl.int8)
    b = tl.load(
        w + client * (CO * TAPS) + co[:, None] * TAPS + k[None, :],
        mask=(co < CO)[:, None] & (k < TAPS)[None, :],
        other=0.0,
    )
    columns += client * samples * (POOL * POOL * PH * PW * TAPS)
    kept = there[:, None] & (k < TAPS)[None, :]
    for corner in tl.static_range(POOL * POOL):
        nothing = tl.zeros((ROWS, TERMS), tl.float32)
        product = _product(tl.where(place == corner, gradient, 0.0), b, nothing, PRECISION)
        at = ((n * (POOL * PH) + top + corner // POOL) * (POOL * PW) + left + corner % POOL) * TAPS
        tl.store(columns + at[:, None] + k[None, :], product, mask=kept)


@triton.jit
def _fold_columns(
    columns, dx, samples,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images: the sum over all kernels that cover a pixel."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = m // (H * W)
    ih = (m // W) % H
    iw = m % W
    ci = tl.arange(0, WIDE)
    columns += client * samples * (POOL * POOL * PH * PW * KS * KS * CI)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for tap in tl.static_range(KS * KS):
        oh = ih + PAD - tap // KS
        ow = iw + PAD - tap % KS
        seen = (n < samples) & (oh >= 0) & (oh < POOL * PH) & (ow >= 0) & (ow < POOL * PW)
        at = ((n * (POOL * PH) + oh) * (POOL * PW) + ow) * (KS * KS * CI) + tap * CI
        total += tl.load(columns + at[:, None] + ci[None, :], mask=seen[:, None] & (ci < CI)[None, :], other=0.0)
    into = client * samples * (H * W * CI) + m[:, None] * CI + ci[None, :]
    tl.store(dx + into, total, mask=(n < samples)[:, None] & (ci < CI)[None, :])


def pooled_size(images: Tensor, block: ConvBlock) -> tuple[int, int]:
    """Return the height and width after the block."""
    return tuple((side + 2 * block.padding - block.kernel + 1) // block.pool for side in images.shape[2:4])  # type: ignore[return-value]


class _ConvBlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, block: ConvBlock, precision: str) -> Tensor:
        clients, samples, height, width, inside = x.shape
        outside = weight.shape[1]
        high, wide = pooled_size(x, block)
        y = x.new_empty(clients, samples, high, wide, outside)
        places = torch.empty(y.shape if block.pool == 2 else 1, dtype=torch.int8, device=x.device)
        taps = weight.permute(0, 3, 4, 2, 1).contiguous()
        bias = bias.contiguous()
        t = FORWARD if block.pool == 2 else UNPOOLED
        sides = (height, width, inside, outside, block.kernel, block.padding, high, wide, block.pool)
        _forward[(triton.cdiv(samples * high * wide, t.rows), clients)](
            x, taps, bias, y, places, samples, block.slope, *sides, block.kind, precision,
            t.rows, t.terms, _power(outside), num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, y, places)
        ctx.block, ctx.precision, ctx.sides = block, precision, sides
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, places = ctx.saved_tensors
        block, sides, precision = ctx.block, ctx.sides, ctx.precision
        dy = dy.contiguous()
        g = torch.empty_like(dy)
        _activation_gradient[(triton.cdiv(g.numel(), 4096),)](
            dy, y, g, block.slope, g.numel(), block.kind, 4096, num_warps=8
        )
        wanted = ctx.needs_input_grad
        dx = _input_gradient(g, places, weight, x.shape, sides, precision) if wanted[0] else None
        dw = _weight_gradient(x, g, places, weight.shape, sides, precision) if wanted[1] else None
        return dx, dw, g.flatten(1, 3).sum(1) if wanted[2] else None, None, None


def _weight_gradient(x: Tensor, g: Tensor, places: Tensor, shape: Any, sides: Any, precision: str) -> Tensor:
    clients, samples, high, wide, out_channels = g.shape
    in_channels, kernel = shape[2], shape[3]
    t = WEIGHTS
    terms = kernel * kernel * in_channels
    each = triton.cdiv(triton.cdiv(samples * high * wide, t.parts), t.rows) * t.rows
    gradients = g.new_empty(clients, t.parts, out_channels, terms)
    _weights[(triton.cdiv(terms, t.terms), t.parts, clients)](
        x, g, places, gradients, samples, *sides, precision, t.rows, t.terms, _power(out_channels), t.parts, each,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return gradients.sum(1).view(clients, out_channels, kernel, kernel, in_channels).permute(0, 1, 4, 2, 3)


def _input_gradient(g: Tensor, places: Tensor, weight: Tensor, shape: Any, sides: Any, precision: str) -> Tensor:
    clients, samples, height, width, inside = shape
    outside, kernel, padding, high, wide, pool = sides[3:]
    taps = kernel * kernel * inside
    columns = g.new_empty(clients, samples * pool * pool * high * wide, taps)
    t = INPUTS if taps > 32 else dataclasses.replace(INPUTS, terms=32)
    _columns[(triton.cdiv(samples * high * wide, t.rows), triton.cdiv(taps, t.terms), clients)](
        g, places, weight.permute(0, 1, 3, 4, 2).contiguous(), columns, samples, outside, taps, high, wide, pool,
        precision,
        t.rows, t.terms, _power(outside), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    dx = g.new_empty(shape)
    channels = int(triton.next_power_of_2(inside))
    rows = max(16, FOLDED // channels)
    _fold_columns[(triton.cdiv(samples * height * width, rows), clients)](
        columns, dx, samples, height, width, inside, kernel, padding, high, wide, pool, rows, channels, num_warps=4
    )
    return dx


def _power(width: int) -> int:
    """Return a tile's width: a power of two that tensor cores support."""
    return max(16, int(triton.next_power_of_2(width)))


def conv_block(x: Tensor, weight: Tensor, bias: Tensor, block: ConvBlock, precision: str = "ieee") -> Tensor:
    """Apply weights [clients, out, in, kernel, kernel] to images [clients, samples, height, width, in], channels last.

    `precision` is «ieee», «tf32x3», «tf32» or «bf16» in the products; sums are always float32.
    """
    high, wide = pooled_size(x, block)
    taps = block.kernel**2 * x.shape[4]
    most = _LARGEST // max(1, block.pool**2 * high * wide * max(taps, weight.shape[1]))
    parts = [
        _ConvBlockFunction.apply(part.contiguous(), weight, bias, block, precision)
        for part in x.split(max(1, most), dim=1)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
