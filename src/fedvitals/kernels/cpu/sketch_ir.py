# SPDX-License-Identifier: Apache-2.0
"""The count sketch of `kernels.sketch` as LLVM assembly, for CPUs.

`sketch_<kind>(values, stride, vectors, length, totals)` adds each vector, `stride` bytes after the previous one, to its
own 512 totals in float64. A row of 256 coordinates that is rotated by `r` buckets goes to totals `r` to `r + 255`:
contiguous memory, without a wrap inside the loop. The caller adds the upper 256 totals to the lower ones.
"""

from __future__ import annotations

from fedvitals.kernels.cpu.emitter import POINTER, WORD, Function, Type, Value
from fedvitals.kernels.sketch_hash import HIGH_FACTOR, MIX_FACTORS, ROW_SEED, SIZE

LANES = 16
_KINDS = {"float32": "float", "float64": "double"}
_HALF_WORD = Type("i32")


def functions() -> list[Function]:
    """Return the functions `sketch_float32` and `sketch_float64`."""
    return [_sketch(kind, element) for kind, element in _KINDS.items()]


def _sketch(kind: str, element: str) -> Function:
    parameters = {"values": POINTER, "stride": WORD, "vectors": WORD, "begin": WORD, "end": WORD, "totals": POINTER}
    f = Function(f"sketch_{kind}", "void", parameters, public=True)
    values, stride, vectors, begin, end, totals = f.parameters
    whole = f.bitwise_and(end, WORD(-SIZE))

    def add(first: Value, start: Value, bucket: Value, key: Value, lanes: int) -> None:
        """Add the coordinates from `start` on to the totals from `bucket` on."""
        value = f.load(Type(element, lanes), f.address(first, element, start), 4 if element == "float" else 8)
        index = f.add(f.splat(f.convert("trunc", start, "i32"), lanes), f.lane_numbers(Type("i32", lanes)))
        top = f.bitwise_and(_mix(f, f.bitwise_xor(index, f.splat(key, lanes))), index.type(-(2**31)))
        if element == "double":
            top = f.shift_left(f.convert("zext", top, "i64"), 32)
        bits = f.bitwise_xor(f.convert("bitcast", value, top.type.element), top)
        signed = f.convert("bitcast", bits, element)
        exact = signed if element == "double" else f.convert("fpext", signed, "double")
        place = f.address(bucket, "double", f.bitwise_and(start, WORD(SIZE - 1)))
        f.store(f.add(exact, f.load(exact.type, place, 8)), place, 8)

    def row(first: Value, own: Value, start: Value, stop: Value, lanes: int) -> None:
        """Add the coordinates from `start`, which begins a row of 256, until `stop`."""
        number = f.convert("trunc", f.shift_right(start, 8), "i32")
        hashed = _mix(f, f.bitwise_xor(number, _HALF_WORD(_signed(ROW_SEED))))
        rotation = f.convert("zext", f.shift_right(hashed, 24), "i64")
        high = f.convert("trunc", f.shift_right(start, 32), "i32")
        key = f.multiply(high, _HALF_WORD(_signed(HIGH_FACTOR)))
        bucket = f.address(own, "double", rotation)

        def coordinates(at: Value, _: dict[str, Value]) -> dict[str, Value]:
            add(first, at, bucket, key, lanes)
            return {}

        f.loop((start, stop, max(1, lanes)), {}, coordinates)

    def vector(number: Value, _: dict[str, Value]) -> dict[str, Value]:
        first = f.address(values, "i8", f.multiply(number, stride))
        own = f.address(totals, f"[{2 * SIZE} x double]", number)

        def whole_row(start: Value, _: dict[str, Value]) -> dict[str, Value]:
            row(first, own, start, f.add(start, WORD(SIZE)), LANES)
            return {}

        f.loop((begin, whole, SIZE), {}, whole_row)
        row(first, own, whole, end, 0)
        return {}

    f.loop((WORD(0), vectors, 1), {}, vector)
    f.finish()
    return f


def _mix(f: Function, x: Value) -> Value:
    for shift, factor in zip((16, 15), MIX_FACTORS, strict=True):
        x = f.multiply(f.bitwise_xor(x, f.shift_right(x, shift)), x.type(_signed(factor)))
    return x


def _signed(number: int) -> int:
    """Return the same 32 bits as a signed number, as LLVM spells its constants."""
    return number - 2**32 if number >= 2**31 else number
