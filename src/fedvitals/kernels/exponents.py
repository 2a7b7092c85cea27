# SPDX-License-Identifier: Apache-2.0
"""Histograms over sign and binary exponent, counted from the bits: no logarithms, and mergeable by addition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedvitals.kernels.fallback import common_device
from fedvitals.kernels.layout import readable
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT

CHUNK = 1 << 22  # values at a time: their bits are copied as 64-bit integers


class FloatFormat(NamedTuple):
    """The IEEE 754 layout of a number: sign, `exponent` bits, `mantissa` bits; the exponent is stored plus `bias`."""

    integer: torch.dtype
    exponent: int
    mantissa: int
    bias: int


FORMATS = {torch.float32: FloatFormat(torch.int32, 8, 23, 127), torch.float64: FloatFormat(torch.int64, 11, 52, 1023)}


def histogram(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return `[layers, 128]` in float64; the columns are `stats.HISTOGRAM_COLUMNS`. Zero, NaN and infinity are in no
    bin.
    """
    device = common_device(tensors)
    counts = torch.zeros(len(tensors), 2 * EXPONENTS, dtype=torch.float64, device=device)
    for layer, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values = readable(tensor).detach().reshape(-1)
        if values.device.type == "mps":
            values = values.cpu()
        for start in range(0, values.numel(), CHUNK):
            counts[layer] += _chunk(values[start : start + CHUNK]).to(device)
    return counts


def _chunk(values: Tensor) -> Tensor:
    if values.dtype not in FORMATS:
        # 16-bit floats become float32, where even their smallest (denormal) numbers have an exponent of their own
        values = values.float() if values.is_floating_point() else values.double()
    bits = FORMATS[values.dtype]
    patterns = values.view(bits.integer)
    fields = 1 << bits.exponent
    # Count all patterns of sign and exponent first, then fold the few counts: one pass over the many values.
    head = (patterns >> bits.mantissa) & (2 * fields - 1)
    counts = count_values(head, 2 * fields).double().view(2, fields)
    # Field 0 holds the zeros beside the denormals; the sign bit alone, the most negative integer, is -0.0.
    counts[0, 0] -= (patterns == 0).sum()
    counts[1, 0] -= (patterns == torch.iinfo(bits.integer).min).sum()
    finite = counts[:, :-1]  # the last field is that of NaN and infinity
    exponents = torch.arange(fields - 1, device=values.device) - bits.bias
    places = (exponents - LOWEST_EXPONENT).clamp(0, EXPONENTS - 1)
    folded = torch.zeros(2, EXPONENTS, dtype=torch.float64, device=values.device).index_add_(1, places, finite)
    return folded.flip(0).reshape(-1)  # the sign bit is 1 for negative numbers, whose bins come first


def count_values(places: Tensor, number: int) -> Tensor:
    """Return how often each of 0 to `number` − 1 occurs. On a GPU `torch.bincount` would synchronise."""
    if places.is_cpu:
        return torch.bincount(places, minlength=number)
    counts = torch.zeros(number, dtype=torch.int64, device=places.device)
    ones = torch.ones((), dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places.long(), ones.expand(places.shape))
