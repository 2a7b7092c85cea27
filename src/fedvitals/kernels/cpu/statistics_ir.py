# SPDX-License-Identifier: Apache-2.0
"""The statistics kernel as LLVM assembly: nine statistics of every tensor in one reading of its memory.

Why assembly and not a loop that a compiler vectorises: minimum and maximum with NaN rules, and a mixture of sums and
counts, are what auto-vectorisers give up on; written as vector instructions the loop runs at the speed of memory.

How one tensor is read (`tensor_<kind>`):

1. Memory is cut into *blocks* of 128 values per lane and accumulator. `fast_<kind>` reads a block in the tensor's own
   precision (float32 for the 16-bit kinds), without asking of any value whether it is finite. So few values meet in
   one float32 accumulator that rounding stays near 1e-6; the totals over blocks are float64.
2. The block's sum of squares then proves whether that was right. If it is finite, no value was NaN or infinite and no
   square overflowed. If it is not tiny, no square that matters was lost to underflow. Both hold for nearly every block
   of a healthy model, so the question costs one comparison per block instead of one per value.
3. A block that fails is read again by `exact_<kind>`: in float64, every value tested, NaN and infinite ones counted
   and left out. Trouble rarely comes alone: after such a block the next one starts with the exact reading at once.
4. The last values, fewer than one turn of the fast loop, take the exact reading too.

`sums` calls the function of its kind for every tensor of a table, so that one foreign call serves a whole model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.kernels.cpu import sketch_ir
from fedvitals.kernels.cpu.emitter import BIT, DOUBLE, POINTER, WORD, Function, Type, Value
from fedvitals.stats import COUNT, INFS, MAX, MIN, NANS, STATISTICS, SUM, SUM_MAGNITUDES, SUM_SQUARES, ZEROS

TERMS_PER_LANE = 128  # more would cost accuracy, fewer speed: totals are made once per block
EXACT_LANES = 8
PREFETCH_BYTES = 4096  # one page ahead: there the hardware's own prefetcher stops
CACHE_LINE = 64

# How two partial results of a column become one, and what it starts from.
JOIN = dict.fromkeys(range(len(STATISTICS)), "add") | {MIN: "min", MAX: "max"}
START = {"add": 0.0, "min": float("inf"), "max": float("-inf")}
FAST_FLOATS = (SUM, SUM_SQUARES, SUM_MAGNITUDES, MIN, MAX)
FAST = (*FAST_FLOATS, ZEROS)
EXACT = (*FAST, NANS, INFS)

Columns = dict[int, Value]  # a value for each column of the result row


@dataclass(frozen=True, slots=True)
class Kind:
    """A number type: its layout in memory and the working precision of the fast loop."""

    name: str
    memory: str
    bytes: int
    working: str

    @property
    def working_bytes(self) -> int:
        return {"float": 4, "double": 8}[self.working]

    @property
    def tiny(self) -> float:
        """The sum of squares below which a block may have lost digits to underflow (also with denormals flushed)."""
        return {"float": 2.0**-83, "double": 2.0**-980}[self.working]

    @property
    def huge(self) -> float:
        """The sum of squares below which a block can be summed in the working precision."""
        return {"float": 2.0**127, "double": float("inf")}[self.working]


KINDS = {
    "float32": Kind("float32", "float", 4, "float"),
    "float64": Kind("float64", "double", 8, "double"),
    "float16": Kind("float16", "half", 2, "float"),
    "bfloat16": Kind("bfloat16", "i16", 2, "float"),  # the upper half of a float32
}


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The vector registers that the code is written for: their bytes, and the number of accumulators of each kind."""

    vector_bytes: int
    unroll: int

    def lanes(self, kind: Kind) -> int:
        return self.vector_bytes // kind.working_bytes

    def turn(self, kind: Kind) -> int:
        """Return the values per iteration of the fast loop."""
        return self.lanes(kind) * self.unroll


def module(shape: VectorShape, kinds: list[Kind]) -> str:
    """Return the whole kernel as LLVM assembly: `sums`, `sums_at`, one `tensor_<kind>` per kind, and the sketches."""
    functions = [build(shape, kind) for kind in kinds for build in (_fast, _exact, _tensor)]
    functions += [_sums(), _sums_at(), *sketch_ir.functions()]
    declarations = sorted(set().union(*(function.declarations for function in functions)))
    return "\n\n".join([*(function.text() for function in functions), "\n".join(declarations), ""])


def _sums() -> Function:
    """Emit `sums(table, tensors, rows)`: each table row holds the address of a function, of the values, and a
    length.
    """
    f = Function("sums", "void", {"table": POINTER, "tensors": WORD, "rows": POINTER}, public=True)
    table, tensors, rows = f.parameters

    def one_tensor(index: Value, _: dict[str, Value]) -> dict[str, Value]:
        line = f.address(table, "[3 x i64]", index)
        function, values, length = (f.load(WORD, f.address(line, "i64", WORD(i)), 8) for i in range(3))
        row = f.address(rows, f"[{len(STATISTICS)} x double]", index)
        f.call_address(function, f.convert("inttoptr", values, "ptr"), length, row)
        return {}

    f.loop((WORD(0), tensors, 1), {}, one_tensor)
    f.finish()
    return f


def _sums_at() -> Function:
    """Emit `sums_at(arguments)`: `sums` with its three arguments in memory, since passing each from Python takes
    time.
    """
    f = Function("sums_at", "void", {"arguments": POINTER}, public=True)
    (arguments,) = f.parameters
    table, tensors, rows = (f.load(WORD, f.address(arguments, "i64", WORD(i)), 8) for i in range(3))
    f.call_void("sums", f.convert("inttoptr", table, "ptr"), tensors, f.convert("inttoptr", rows, "ptr"))
    f.finish()
    return f


def _tensor(shape: VectorShape, kind: Kind) -> Function:
    """Emit `tensor_<kind>(values, length, row)`: the whole row of one tensor, block by block."""
    f = Function(f"tensor_{kind.name}", "void", {"values": POINTER, "length": WORD, "row": POINTER}, public=True)
    values, length, row = f.parameters
    for column, join in JOIN.items():
        f.store(DOUBLE(START[join]), _cell(f, row, column), 8)
    f.store(f.convert("sitofp", length, "double"), _cell(f, row, COUNT), 8)

    turn = shape.turn(kind)
    block = TERMS_PER_LANE * turn
    whole = f.bitwise_and(length, WORD(-turn))  # a turn is a power of two: this rounds down to whole turns

    def one_block(index: Value, state: dict[str, Value]) -> dict[str, Value]:
        start = f.address(values, kind.memory, index)
        size = f.smaller(f.subtract(whole, index), WORD(block))
        done = f.choose(
            state["suspect"],
            then=lambda: BIT(0),
            otherwise=lambda: f.call(f"fast_{kind.name}", start, size, row),
        )
        suspect = f.choose(
            done,
            then=lambda: BIT(0),
            otherwise=lambda: f.call(f"exact_{kind.name}", start, size, row),
        )
        return {"suspect": suspect}

    f.loop((WORD(0), whole, block), {"suspect": BIT(0)}, one_block)
    f.call(f"exact_{kind.name}", f.address(values, kind.memory, whole), f.subtract(length, whole), row)
    f.finish()
    return f


def _fast(shape: VectorShape, kind: Kind) -> Function:
    """Emit `fast_<kind>(values, length, row)`: adds the block to the row and returns true, or returns false.

    The length is a multiple of an iteration's values. Several sets of accumulators alternate, because an addition must
    wait for the previous one in the same accumulator.
    """
    f = Function(f"fast_{kind.name}", "i1", {"values": POINTER, "length": WORD, "row": POINTER})
    values, length, row = f.parameters
    lanes, turn = shape.lanes(kind), shape.turn(kind)
    sets = range(shape.unroll)

    def one_turn(index: Value, running: dict[tuple[int, int], Value]) -> dict[tuple[int, int], Value]:
        start = f.address(values, kind.memory, index)
        for offset in range(0, turn * kind.bytes, CACHE_LINE):
            f.prefetch(f.address(start, "i8", WORD(PREFETCH_BYTES + offset)))
        following = {}
        for number in sets:
            place = f.address(start, kind.memory, WORD(number * lanes))
            value = _load(f, kind, place, Type(kind.working, lanes))
            magnitude = f.magnitude(value)
            following[number, SUM] = f.add(value, running[number, SUM])
            following[number, SUM_SQUARES] = f.add_square(value, running[number, SUM_SQUARES])
            following[number, SUM_MAGNITUDES] = f.add(magnitude, running[number, SUM_MAGNITUDES])
            following[number, MIN] = f.smaller(value, running[number, MIN])
            following[number, MAX] = f.larger(value, running[number, MAX])
            following[number, ZEROS] = _count(f, f.compare("oeq", value, value.type(0)), running[number, ZEROS])
        return following

    initial = {(number, column): _start(column, Type(kind.working, lanes)) for number in sets for column in FAST}
    after = f.loop((WORD(0), length, turn), initial, one_turn)
    total = {column: after[0, column] for column in FAST}
    for number in sets[1:]:
        total = {column: _join(f, column, after[number, column], total[column]) for column in FAST}
    total = {column: f.reduce_lanes(JOIN[column], value) for column, value in total.items()}

    def accept() -> Value:
        _add_to_row(f, total, row)
        return BIT(1)

    clean = _in_range(f, total, kind.tiny, float("inf"))
    f.finish(f.choose(clean, then=accept, otherwise=lambda: BIT(0)))
    return f


def _in_range(f: Function, total: Columns, tiny: float, huge: float) -> Value:
    """Return whether no square over- or underflowed; false if the block holds a NaN or infinity."""
    squares, magnitudes = total[SUM_SQUARES], total[SUM_MAGNITUDES]
    not_huge = f.compare("olt", squares, squares.type(huge))
    not_tiny = f.compare("oge", squares, squares.type(tiny))
    all_zero = f.compare("oeq", magnitudes, magnitudes.type(0))
    return f.bitwise_and(not_huge, f.bitwise_or(not_tiny, all_zero))


def _exact(_: VectorShape, kind: Kind) -> Function:
    """Emit `exact_<kind>(values, length, row)`: adds values in float64 and returns whether they needed that."""
    f = Function(f"exact_{kind.name}", "i1", {"values": POINTER, "length": WORD, "row": POINTER})
    values, length, row = f.parameters
    whole = f.bitwise_and(length, WORD(-EXACT_LANES))
    wide = _exact_loop(f, kind, (values, WORD(0), whole), EXACT_LANES)
    rest = _exact_loop(f, kind, (values, whole, length), 1)
    total = {column: _join(f, column, wide[column], rest[column]) for column in EXACT}
    _add_to_row(f, total, row)
    nonfinite = f.compare("ne", f.add(total[NANS], total[INFS]), WORD(0))
    f.finish(f.bitwise_or(nonfinite, f.bitwise_not(_in_range(f, total, kind.tiny, kind.huge))))
    return f


def _exact_loop(f: Function, kind: Kind, span: tuple[Value, Value, Value], lanes: int) -> Columns:
    """Return a scalar for every column of the values from `start` to `stop`, a multiple of `lanes`."""
    values, start, stop = span
    vector = Type("double", lanes)

    def one_vector(index: Value, running: Columns) -> Columns:
        value = _load(f, kind, f.address(values, kind.memory, index), vector)
        magnitude = f.magnitude(value)
        finite = f.compare("one", magnitude, vector(float("inf")))  # «ordered and not equal»: false for NaN too
        kept, kept_magnitude = f.select(finite, value, vector(0)), f.select(finite, magnitude, vector(0))
        return {
            SUM: f.add(kept, running[SUM]),
            SUM_SQUARES: f.add_square(kept, running[SUM_SQUARES]),
            SUM_MAGNITUDES: f.add(kept_magnitude, running[SUM_MAGNITUDES]),
            MIN: f.smaller(f.select(finite, value, running[MIN]), running[MIN]),
            MAX: f.larger(f.select(finite, value, running[MAX]), running[MAX]),
            ZEROS: _count(f, f.compare("oeq", value, vector(0)), running[ZEROS]),
            NANS: _count(f, f.compare("uno", value, value), running[NANS]),
            INFS: _count(f, f.compare("oeq", magnitude, vector(float("inf"))), running[INFS]),
        }

    after = f.loop((start, stop, lanes), {column: _start(column, vector) for column in EXACT}, one_vector)
    return {column: f.reduce_lanes(JOIN[column], value) for column, value in after.items()}


def _load(f: Function, kind: Kind, address: Value, wanted: Type) -> Value:
    """Load as many values as `wanted` has lanes, widened to its element."""
    value = f.load(wanted.of(kind.memory), address, kind.bytes)
    if kind.memory == "i16":
        value = f.convert("bitcast", f.shift_left(f.convert("zext", value, "i32"), 16), "float")
    elif kind.memory == "half":
        value = f.convert("fpext", value, "float")
    return value if value.type == wanted else f.convert("fpext", value, wanted.element)


def _start(column: int, floats: Type) -> Value:
    """Return a column's initial value. Counts are integers as wide as the floats, so that masks need no conversion."""
    type_ = floats if column in FAST_FLOATS else floats.of({"float": "i32", "double": "i64"}[floats.element])
    return type_(START[JOIN[column]])


def _join(f: Function, column: int, a: Value, b: Value) -> Value:
    return {"add": f.add, "min": f.smaller, "max": f.larger}[JOIN[column]](a, b)


def _count(f: Function, mask: Value, counter: Value) -> Value:
    """Add one in every lane where the mask is set; becomes one masked addition."""
    return f.select(mask, f.add(counter, counter.type(1)), counter)


def _cell(f: Function, row: Value, column: int) -> Value:
    return f.address(row, "double", WORD(column))


def _add_to_row(f: Function, total: Columns, row: Value) -> None:
    for column, value in total.items():
        cell = _cell(f, row, column)
        exact = value
        if value.type.element == "float":
            exact = f.convert("fpext", value, "double")
        elif not value.type.floating:
            exact = f.convert("sitofp", value, "double")
        f.store(_join(f, column, exact, f.load(DOUBLE, cell, 8)), cell, 8)
