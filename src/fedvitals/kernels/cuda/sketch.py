# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN201 - Triton's language looks like Python: its types are those of registers
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, unused-ignore"
"""The count sketch of `kernels.sketch` on a GPU, in Triton. Imported only where Triton runs."""

import triton
import triton.language as tl

from fedvitals.kernels import sketch_hash

SIZE = tl.constexpr(sketch_hash.SIZE)
ROW_SEED = tl.constexpr(sketch_hash.ROW_SEED)
HIGH_FACTOR = tl.constexpr(sketch_hash.HIGH_FACTOR)
FIRST_FACTOR = tl.constexpr(sketch_hash.MIX_FACTORS[0])
SECOND_FACTOR = tl.constexpr(sketch_hash.MIX_FACTORS[1])
ROWS = tl.constexpr(8)  # rows of 256 coordinates that are loaded together
PARTS = tl.constexpr(16)  # parts that are added together


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * FIRST_FACTOR
    return (x ^ (x >> 15)) * SECOND_FACTOR


@triton.jit(
    do_not_specialize=["stride", "length", "first_row", "each"], do_not_specialize_on_alignment=["vectors", "partial"]
)
def sketch_parts(vectors, stride, length, first_row, each, partial):
    """Sum `each` rows of 256 coordinates of one vector into its part of `partial`, [vectors, parts, 256].

    `vectors` are `length` values each and `stride` values apart; they begin with the row `first_row` of a longer one.
    """
    part, vector = tl.program_id(0), tl.program_id(1)
    first = vectors + vector.to(tl.int64) * stride
    lane = tl.arange(0, SIZE)[None, :]
    total = tl.zeros([ROWS, SIZE], tl.float64)
    done = 0
    while done < each:  # Triton's interpreter, which the tests use, cannot count to a number that it has loaded
        row = part.to(tl.int64) * each + done + tl.arange(0, ROWS)[:, None]
        number = row + first_row
        rotation = (mix(number.to(tl.uint32) ^ ROW_SEED) >> 24).to(tl.int32)
        column = (lane - rotation) & (SIZE - 1)
        place = row * SIZE + column
        inside = (place < length) & (row < (part.to(tl.int64) + 1) * each)
        value = tl.load(first + place, mask=inside, other=0.0)
        index = number * SIZE + column
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
        negative = (mix(low ^ (high * HIGH_FACTOR)) >> 31) == 1
        total += tl.where(negative, -value, value).to(tl.float64)
        done += ROWS
    sums = tl.sum(total, axis=0)
    out = partial + (vector.to(tl.int64) * tl.num_programs(0) + part) * SIZE
    tl.store(out + tl.arange(0, SIZE), sums)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["partial", "sketches"])
def add_parts(partial, parts, sketches):
    """Add up the parts of one vector, in an order that depends only on their number."""
    vector = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)[None, :]
    total = tl.zeros([PARTS, SIZE], tl.float64)
    done = 0
    while done < parts:
        part = done + tl.arange(0, PARTS)[:, None]
        total += tl.load(partial + (vector * parts + part) * SIZE + lane, mask=part < parts, other=0.0)
        done += PARTS
    tl.store(sketches + vector * SIZE + tl.arange(0, SIZE), tl.sum(total, axis=0))
