# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN201, SIM300 - Triton's language looks like Python: its types are those of registers
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, unused-ignore"
"""The nine sums on a GPU, in Triton: one pass over memory, no atomics, no synchronisation.

Memory is cut into pieces ("items"), each within one tensor ("segment"). `partials_of` reduces an item to eight numbers,
`combine` a segment's items, in order and in float64, to its row: the same input gives the same bits.

An item is read in tiles of four independent 16-byte loads per thread, so that enough loads are in flight to keep the
memory busy, and summed in float32 per lane. Tensors may begin anywhere: positions count from the 16-byte border at or
before the first value, and only the tiles that hold the tensor's begin or end are masked.

NaN, infinity, overflow and underflow of squares need no test of each value: the sums reveal them (as on the CPU,
`cpu/statistics_ir.py`). An item that is not proved clean is read again in float64, value by value.
"""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
CLEAN = tl.constexpr(2e-25)  # a sum of squares below it may have lost squares that are too small for float32
COLUMNS = tl.constexpr(9)
PARTIALS = tl.constexpr(8)  # numbers of an item; its count is known
BORDER = tl.constexpr(16)  # bytes, which a thread loads at once


@triton.jit
def add_all(x, y, z, w, total, squares, magnitudes, smallest, largest, zeros):
    """Add four values per lane, all of which count."""
    total += (x + y) + (z + w)
    squares += x * x
    squares += y * y
    squares += z * z
    squares += w * w
    magnitudes += (tl.abs(x) + tl.abs(y)) + (tl.abs(z) + tl.abs(w))
    smallest = tl.minimum(smallest, tl.minimum(tl.minimum(x, y), tl.minimum(z, w)))
    largest = tl.maximum(largest, tl.maximum(tl.maximum(x, y), tl.maximum(z, w)))
    zeros += tl.where(x == 0, 1.0, 0.0)
    zeros += tl.where(y == 0, 1.0, 0.0)
    zeros += tl.where(z == 0, 1.0, 0.0)
    zeros += tl.where(w == 0, 1.0, 0.0)
    return total, squares, magnitudes, smallest, largest, zeros


@triton.jit
def add_some(pointer, at, first, last, total, squares, magnitudes, smallest, largest, zeros, BLOCK: tl.constexpr):
    """Add a tile of which only the values from `first` to `last` (excluded) count."""
    for part in tl.static_range(4):
        index = at + part * BLOCK + tl.arange(0, BLOCK)
        inside = (index >= first) & (index < last)
        x = tl.load(pointer + index, mask=inside, other=0.0).to(tl.float32)
        total += x
        squares += x * x
        magnitudes += tl.abs(x)
        smallest = tl.minimum(smallest, tl.where(inside, x, INF))
        largest = tl.maximum(largest, tl.where(inside, x, -INF))
        zeros += tl.where(inside & (x == 0), 1.0, 0.0)
    return total, squares, magnitudes, smallest, largest, zeros


@triton.jit
def sum_fast(pointer, first, last, BLOCK: tl.constexpr):
    """Return six sums of the values from `first` to `last` (excluded) in float32; `pointer` is at a 16-byte border."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    magnitudes = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], INF, tl.float32)
    largest = tl.full([BLOCK], -INF, tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)  # few per lane: exact, and cheaper than integers
    at = 0
    if (first > 0) | (last < 4 * BLOCK):
        total, squares, magnitudes, smallest, largest, zeros = add_some(
            pointer, 0, first, last, total, squares, magnitudes, smallest, largest, zeros, BLOCK
        )
        at = 4 * BLOCK
    while at + 4 * BLOCK <= last:
        here = tl.multiple_of(pointer + at + lane, BORDER)
        x = tl.load(here)
        y = tl.load(here + BLOCK)
        z = tl.load(here + 2 * BLOCK)
        w = tl.load(here + 3 * BLOCK)
        total, squares, magnitudes, smallest, largest, zeros = add_all(
            x.to(tl.float32), y.to(tl.float32), z.to(tl.float32), w.to(tl.float32),
            total, squares, magnitudes, smallest, largest, zeros,
        )  # fmt: skip
        at += 4 * BLOCK
    if at < last:
        total, squares, magnitudes, smallest, largest, zeros = add_some(
            pointer, at, first, last, total, squares, magnitudes, smallest, largest, zeros, BLOCK
        )
    return (tl.sum(total), tl.sum(squares), tl.sum(magnitudes),
            tl.min(smallest), tl.max(largest), tl.sum(zeros))  # fmt: skip


@triton.jit
def sum_exact(pointer, first, last, BLOCK: tl.constexpr, EXTREME: tl.constexpr):
    """Return eight sums of the same values in float64, value by value; extremes are compared in the type `EXTREME`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    magnitudes = tl.zeros([BLOCK], tl.float64)
    smallest = tl.full([BLOCK], INF, EXTREME)
    largest = tl.full([BLOCK], -INF, EXTREME)
    zeros = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    at = 0
    while at < last:  # Triton's interpreter, which the tests use, cannot loop up to a loaded number
        index = at + lane
        inside = (index >= first) & (index < last)
        x = tl.load(pointer + index, mask=inside, other=0.0).to(EXTREME)
        finite = inside & (tl.abs(x) < INF)
        kept = tl.where(finite, x, 0.0).to(tl.float64)
        total += kept
        squares += kept * kept
        magnitudes += tl.abs(kept)
        smallest = tl.minimum(smallest, tl.where(finite, x, INF))
        largest = tl.maximum(largest, tl.where(finite, x, -INF))
        zeros += (finite & (x == 0)).to(tl.int32)
        nans += (inside & (x != x)).to(tl.int32)  # noqa: PLR0124 - only NaN differs from itself
        infs += (inside & (tl.abs(x) == INF)).to(tl.int32)
        at += BLOCK
    return (tl.sum(total), tl.sum(squares), tl.sum(magnitudes), tl.min(smallest), tl.max(largest),
            tl.sum(zeros), tl.sum(nans), tl.sum(infs))  # fmt: skip


# Alignment is handled by the kernel itself: one compiled kernel serves all addresses.
@triton.jit(
    do_not_specialize=["stride", "offset", "count", "chunk"],
    do_not_specialize_on_alignment=["addresses", "items", "partials"],
)
def partials_of(
    addresses, stride, items, offset, count, chunk, partials,
    LISTED: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Write an item's eight numbers into column `item` of `partials`, [8, count].

    `items` is [4, count]: row and first value of the segment in a matrix (`addresses` is the matrix, whose rows are
    `stride` values apart), or, if LISTED, the index of the segment's address in `addresses`, and nothing; then the
    segment's length, and the item's start in it, counted from the border; an item has at most `chunk` values.
    """
    item = offset + tl.program_id(0)
    row, start = tl.load(items + item), tl.load(items + count + item)
    length, position = tl.load(items + 2 * count + item), tl.load(items + 3 * count + item)
    address = tl.load(addresses + row) if LISTED else addresses.to(tl.int64) + (row * stride + start) * SIZE
    over = address % BORDER  # bytes of something else between the border and the segment
    pointer = (address - over + position * SIZE).to(tl.pointer_type(DTYPE))
    head = over // SIZE
    first = tl.maximum(head - position, 0).to(tl.int32)
    last = tl.maximum(tl.minimum(head + length - position, chunk), 0).to(tl.int32)
    out = partials + item
    if DTYPE == tl.float64:
        total, squares, magnitudes, smallest, largest, zeros, nans, infs = sum_exact(
            pointer, first, last, THREADS, tl.float64
        )
    else:
        total32, squares32, magnitudes32, smallest32, largest32, zeros32 = sum_fast(
            pointer, first, last, THREADS * (BORDER // SIZE)
        )
        zeros = zeros32.to(tl.int32)
        total, squares, magnitudes = total32.to(tl.float64), squares32.to(tl.float64), magnitudes32.to(tl.float64)
        smallest, largest = smallest32.to(tl.float64), largest32.to(tl.float64)
        nans, infs = zeros * 0, zeros * 0
        clean = ((squares32 >= CLEAN) & (squares32 < INF)) | (magnitudes32 == 0)
        if not clean:
            total, squares, magnitudes, smallest32, largest32, zeros, nans, infs = sum_exact(
                pointer, first, last, THREADS, tl.float32
            )
            smallest, largest = smallest32.to(tl.float64), largest32.to(tl.float64)
    tl.store(out, total)
    tl.store(out + count, squares)
    tl.store(out + 2 * count, magnitudes)
    tl.store(out + 3 * count, smallest)
    tl.store(out + 4 * count, largest)
    tl.store(out + 5 * count, zeros.to(tl.float64))
    tl.store(out + 6 * count, nans.to(tl.float64))
    tl.store(out + 7 * count, infs.to(tl.float64))


@triton.jit(
    do_not_specialize=["count", "slots"],
    do_not_specialize_on_alignment=["partials", "items_of", "lengths", "rows", "slot"],
)
def combine(partials, count, items_of, lengths, rows, slot, slots, SLOTTED: tl.constexpr, BLOCK: tl.constexpr):
    """Write a segment's row from its items, items_of[0, segment] to items_of[1, segment] (excluded).

    `partials` are those of one step after the other; the grid's second axis are the steps.
    If SLOTTED, `rows` is a ring of `slots` matrices, and the number at `slot`, modulo `slots`, selects one.
    """
    segment, segments, step = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    partials += step * PARTIALS * count
    first, last = tl.load(items_of + segment), tl.load(items_of + segments + segment)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    magnitudes = tl.zeros([BLOCK], tl.float64)
    smallest = tl.full([BLOCK], INF, tl.float64)
    largest = tl.full([BLOCK], -INF, tl.float64)
    zeros = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    at = first
    while at < last:
        here, inside = partials + at + lane, at + lane < last
        total += tl.load(here, mask=inside, other=0.0)
        squares += tl.load(here + count, mask=inside, other=0.0)
        magnitudes += tl.load(here + 2 * count, mask=inside, other=0.0)
        smallest = tl.minimum(smallest, tl.load(here + 3 * count, mask=inside, other=INF))
        largest = tl.maximum(largest, tl.load(here + 4 * count, mask=inside, other=-INF))
        zeros += tl.load(here + 5 * count, mask=inside, other=0.0)
        nans += tl.load(here + 6 * count, mask=inside, other=0.0)
        infs += tl.load(here + 7 * count, mask=inside, other=0.0)
        at += BLOCK
    out = rows + (step * segments + segment) * COLUMNS
    if SLOTTED:
        out += (tl.load(slot) % slots) * segments * COLUMNS
    tl.store(out, tl.load(lengths + segment).to(tl.float64))
    tl.store(out + 1, tl.sum(total))
    tl.store(out + 2, tl.sum(squares))
    tl.store(out + 3, tl.sum(magnitudes))
    tl.store(out + 4, tl.min(smallest))
    tl.store(out + 5, tl.max(largest))
    tl.store(out + 6, tl.sum(zeros))
    tl.store(out + 7, tl.sum(nans))
    tl.store(out + 8, tl.sum(infs))
