# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN201 - Triton's language looks like Python: its types are those of registers
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, unused-ignore"
"""Everything that is measured of an update on a GPU, in Triton: one pass over the parameters and their earlier values.

Memory is cut into items, each within one layer. An item is read in rows of 256 coordinates of the whole vector, as the
sketch wants them (`sketch_hash`): lane b of a row is the coordinate that falls into bucket i. For the other sums the
order within a row does not matter. A lane's sums within an item are float32, as in `statistics.py`, all others float64.

Also as there, values that are not finite or whose squares leave float32's range are recognised by the sums;
such an item is read again, value by value.
"""

import triton
import triton.language as tl

from fedvitals.kernels.cuda.sketch import HIGH_FACTOR, ROW_SEED, SIZE, mix
from fedvitals.kernels.cuda.statistics import CLEAN, INF, add_all


@triton.jit
def no_sums():
    """Return six sums per lane of no values."""
    nothing = tl.zeros([SIZE], tl.float32)
    return nothing, nothing, nothing, nothing + INF, nothing - INF, nothing


@triton.jit
def add(x, inside, total, squares, magnitudes, smallest, largest, zeros):
    """Add values, which are 0 where they are not `inside` and do not count, to six sums per lane."""
    total += x
    squares += x * x
    magnitudes += tl.abs(x)
    smallest = tl.minimum(smallest, tl.where(inside, x, INF))
    largest = tl.maximum(largest, tl.where(inside, x, -INF))
    zeros += tl.where(inside & (x == 0), 1.0, 0.0)
    return total, squares, magnitudes, smallest, largest, zeros


@triton.jit
def row_of(at, number):
    """Return where the coordinate of each bucket of a row lies, and whether its sign is negative.

    The row begins `at` a value of the item, and has a `number` in the whole vector.
    """
    rotation = (mix(number.to(tl.uint32) ^ ROW_SEED) >> 24).to(tl.int32)
    column = (tl.arange(0, SIZE) - rotation) & (SIZE - 1)
    low = (number.to(tl.uint32) << 8) | column.to(tl.uint32)
    negative = (mix(low ^ ((number >> 24).to(tl.uint32) * HIGH_FACTOR)) >> 31) == 1
    return at + column, negative


@triton.jit
def load(pointer, place):
    return tl.load(pointer + place).to(tl.float32)


@triton.jit
def signed(negative, x):
    return tl.where(negative, -x, x)


@triton.jit
def add_rows(
    now, before, initial, changes, at, number, change_sums, weight_sums, others,
    SKETCH: tl.constexpr, WEIGH: tl.constexpr, DRIFT: tl.constexpr, DRIFT_SKETCH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Add four whole rows. `others` are the squares of the earlier parameters and of the drift, and the two sketches,
    each per lane.
    """
    start_squares, drift_squares, sketch, drift_sketch = others
    a, minus_a = row_of(at, number)
    b, minus_b = row_of(at + SIZE, number + 1)
    c, minus_c = row_of(at + 2 * SIZE, number + 2)
    d, minus_d = row_of(at + 3 * SIZE, number + 3)
    now_a, now_b, now_c, now_d = load(now, a), load(now, b), load(now, c), load(now, d)
    old_a, old_b, old_c, old_d = load(before, a), load(before, b), load(before, c), load(before, d)
    new_a, new_b, new_c, new_d = now_a - old_a, now_b - old_b, now_c - old_c, now_d - old_d
    change_sums = add_all(new_a, new_b, new_c, new_d, *change_sums)
    start_squares += (old_a * old_a + old_b * old_b) + (old_c * old_c + old_d * old_d)
    if WEIGH:
        weight_sums = add_all(now_a, now_b, now_c, now_d, *weight_sums)
    if DRIFT:
        way_a, way_b = now_a - load(initial, a), now_b - load(initial, b)
        way_c, way_d = now_c - load(initial, c), now_d - load(initial, d)
        drift_squares += (way_a * way_a + way_b * way_b) + (way_c * way_c + way_d * way_d)
    if SKETCH:
        sketch += (signed(minus_a, new_a) + signed(minus_b, new_b)) + (signed(minus_c, new_c) + signed(minus_d, new_d))
    if DRIFT_SKETCH:
        drift_sketch += signed(minus_a, now_a) + signed(minus_b, now_b)
        drift_sketch += signed(minus_c, now_c) + signed(minus_d, now_d)
    if KEEP:
        tl.store(changes + a, new_a)
        tl.store(changes + b, new_b)
        tl.store(changes + c, new_c)
        tl.store(changes + d, new_d)
    return change_sums, weight_sums, (start_squares, drift_squares, sketch, drift_sketch)


@triton.jit
def add_row(
    now, before, initial, changes, values, at, number, change_sums, weight_sums, others,
    SKETCH: tl.constexpr, WEIGH: tl.constexpr, DRIFT: tl.constexpr, DRIFT_SKETCH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Add one row, of which only a part may belong to the item."""
    start_squares, drift_squares, sketch, drift_sketch = others
    place, negative = row_of(at, number)
    inside = (place >= 0) & (place < values)
    x = tl.load(now + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
    change = x - y
    change_sums = add(change, inside, *change_sums)
    start_squares += y * y
    if WEIGH:
        weight_sums = add(x, inside, *weight_sums)
    if DRIFT:
        way = x - tl.load(initial + place, mask=inside, other=0.0)
        drift_squares += way * way
    if SKETCH:
        sketch += signed(negative, change)
    if DRIFT_SKETCH:
        drift_sketch += signed(negative, x)
    if KEEP:
        tl.store(changes + place, change, mask=inside)
    return change_sums, weight_sums, (start_squares, drift_squares, sketch, drift_sketch)


@triton.jit
def store(out, count, total, squares, magnitudes, smallest, largest, zeros, nans, infs):
    """Write the eight sums of an item into its column, [8, count]."""
    tl.store(out, tl.sum(total.to(tl.float64)))
    tl.store(out + count, tl.sum(squares.to(tl.float64)))
    tl.store(out + 2 * count, tl.sum(magnitudes.to(tl.float64)))
    tl.store(out + 3 * count, tl.min(smallest).to(tl.float64))
    tl.store(out + 4 * count, tl.max(largest).to(tl.float64))
    tl.store(out + 5 * count, tl.sum(zeros.to(tl.float64)))
    tl.store(out + 6 * count, tl.sum(nans.to(tl.float64)))
    tl.store(out + 7 * count, tl.sum(infs.to(tl.float64)))


@triton.jit
def store_exactly(now, before, values, out, count, CHANGE: tl.constexpr):
    """Write the eight sums of an item, read value by value: of its change, or of its values as they are now."""
    lane = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float64)
    squares = tl.zeros([SIZE], tl.float64)
    magnitudes = tl.zeros([SIZE], tl.float64)
    smallest = tl.full([SIZE], INF, tl.float64)
    largest = tl.full([SIZE], -INF, tl.float64)
    zeros = tl.zeros([SIZE], tl.float32)
    nans = tl.zeros([SIZE], tl.float32)
    infs = tl.zeros([SIZE], tl.float32)
    at = 0
    while at < values:
        inside = at + lane < values
        x = tl.load(now + at + lane, mask=inside, other=0.0).to(tl.float32)
        if CHANGE:
            x -= tl.load(before + at + lane, mask=inside, other=0.0).to(tl.float32)
        finite = inside & (tl.abs(x) < INF)
        total, squares, magnitudes, smallest, largest, zeros = add(
            tl.where(finite, x, 0.0).to(tl.float64), finite, total, squares, magnitudes, smallest, largest, zeros
        )
        nans += tl.where(inside & (x != x), 1.0, 0.0)  # noqa: PLR0124 - only NaN differs from itself
        infs += tl.where(inside & (tl.abs(x) == INF), 1.0, 0.0)
        at += SIZE
    store(out, count, total, squares, magnitudes, smallest, largest, zeros, nans, infs)


@triton.jit
def store_clean(
    now, before, values, out, count, total, squares, magnitudes, smallest, largest, zeros, CHANGE: tl.constexpr
):
    """Write the eight sums of an item; unless they prove that all its values are finite, it is read again."""
    sum_squares = tl.sum(squares)
    if ((sum_squares >= CLEAN) & (sum_squares < INF)) | (tl.sum(magnitudes) == 0):
        none = zeros * 0
        store(out, count, total, squares, magnitudes, smallest, largest, zeros, none, none)
    else:
        store_exactly(now, before, values, out, count, CHANGE)


@triton.jit(
    do_not_specialize=["first", "count", "chunk", "first_row"],
    do_not_specialize_on_alignment=[
        "addresses", "before", "initial", "items", "changes", "partials", "squares", "sketches",
    ],
)  # fmt: skip
def measure_items(
    addresses, before, initial, items, first, count, chunk, first_row, changes, partials, squares, sketches,
    DTYPE: tl.constexpr, SKETCH: tl.constexpr, WEIGH: tl.constexpr, DRIFT: tl.constexpr, DRIFT_SKETCH: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Measure one item of the change since `before`, a vector of all parameters as they were.

    `addresses` are those of the layers as they are now. `items` is [4, count]: the item's layer, the layer's place in
    the vector and its length, and the item's position in the layer. `first_row` is the number of the vector's first row
    in a longer one. Written are `partials`, [2, 8, count], of the change and, if WEIGH, of the parameters; `squares`,
    [2, count], of the earlier parameters and, if DRIFT, of the way from `initial`; `sketches`, [2, count, 256], of the
    change and, if DRIFT_SKETCH, of the parameters; if KEEP, the change itself.
    """
    item = first + tl.program_id(0)
    layer, offset = tl.load(items + item), tl.load(items + count + item)
    length, position = tl.load(items + 2 * count + item), tl.load(items + 3 * count + item)
    start = offset + position  # in the vector
    values = tl.minimum(length - position, chunk).to(tl.int32)
    now = tl.load(addresses + layer).to(tl.pointer_type(DTYPE)) + position
    before, initial, changes = before + start, initial + start, changes + start
    number = start // SIZE + first_row
    at = ((start // SIZE) * SIZE - start).to(tl.int32)  # where the first row begins, in the item: at 0, or before it
    nothing = tl.zeros([SIZE], tl.float32)
    change_sums, weight_sums, others = no_sums(), no_sums(), (nothing, nothing, nothing, nothing)
    while at < values:
        if (at >= 0) & (at + 4 * SIZE <= values):
            change_sums, weight_sums, others = add_rows(
                now, before, initial, changes, at, number, change_sums, weight_sums, others,
                SKETCH, WEIGH, DRIFT, DRIFT_SKETCH, KEEP,
            )  # fmt: skip
            at += 4 * SIZE
            number += 4
        else:
            change_sums, weight_sums, others = add_row(
                now, before, initial, changes, values, at, number, change_sums, weight_sums, others,
                SKETCH, WEIGH, DRIFT, DRIFT_SKETCH, KEEP,
            )  # fmt: skip
            at += SIZE
            number += 1
    start_squares, drift_squares, sketch, drift_sketch = others
    store_clean(now, before, values, partials + item, count, *change_sums, True)
    tl.store(squares + item, tl.sum(start_squares.to(tl.float64)))
    if WEIGH:
        store_clean(now, before, values, partials + 8 * count + item, count, *weight_sums, False)
    if DRIFT:
        tl.store(squares + count + item, tl.sum(drift_squares.to(tl.float64)))
    own = sketches + item.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if SKETCH:
        tl.store(own, sketch.to(tl.float64))
    if DRIFT_SKETCH:
        tl.store(own + count.to(tl.int64) * SIZE, drift_sketch.to(tl.float64))
