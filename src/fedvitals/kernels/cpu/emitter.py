# SPDX-License-Identifier: Apache-2.0
"""Emits LLVM assembly: typed values, one method per instruction, and the two control structures that the kernels need.

LLVM assembly is in single assignment form: every instruction defines one new name, and a value that changes in a loop
is a `phi` that selects a value by the preceding block. `Function.loop` and `Function.choose` emit those, so that the
kernels read like programs with loops and branches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Type(NamedTuple):
    """A scalar (`lanes` 0) or a vector of `lanes` elements, which LLVM maps to as many registers as it takes."""

    element: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.element}>" if self.lanes else self.element

    @property
    def suffix(self) -> str:
        """The type as spelled in the names of intrinsic functions: `v16f32`."""
        short = {"float": "f32", "double": "f64"}.get(self.element, self.element)
        return f"v{self.lanes}{short}" if self.lanes else short

    @property
    def floating(self) -> bool:
        return self.element in ("half", "float", "double")

    def of(self, element: str) -> Type:
        """Return the type with as many lanes of another element."""
        return Type(element, self.lanes)

    def __call__(self, number: float) -> Value:
        """Return the constant with this number in every lane."""
        # Floating constants are spelled as the bits of a double, also for float: decimal text may not be exact.
        text = "0x" + struct.pack(">d", number).hex().upper() if self.floating else str(int(number))
        return Value(self, f"<{', '.join([f'{self.element} {text}'] * self.lanes)}>" if self.lanes else text)


class Value(NamedTuple):
    """A constant or the result of an instruction."""

    type: Type
    name: str

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


BIT, WORD, POINTER, DOUBLE = Type("i1"), Type("i64"), Type("ptr"), Type("double")


class Function:
    """A function under construction: each method appends instructions and returns the value they define."""

    def __init__(self, name: str, returns: str, parameters: Mapping[str, Type], *, public: bool = False) -> None:
        self.name = name
        self.returns = returns
        self.parameters = [Value(type_, f"%{parameter}") for parameter, type_ in parameters.items()]
        self.declarations: set[str] = set()
        self._linkage = "" if public else "internal "
        self._lines = ["entry:"]
        self._block = "entry"  # where the next instruction goes: a phi must name the block that a value comes from
        self._names = 0

    def text(self) -> str:
        parameters = ", ".join(map(str, self.parameters))
        body = "\n".join(self._lines)
        return f"define {self._linkage}{self.returns} @{self.name}({parameters}) nounwind {{\n{body}\n}}"

    # Instructions

    def add(self, a: Value, b: Value) -> Value:
        return self._define(a.type, f"{'fadd' if a.type.floating else 'add'} {a}, {b.name}")

    def subtract(self, a: Value, b: Value) -> Value:
        return self._define(a.type, f"sub {a}, {b.name}")

    def bitwise_and(self, a: Value, b: Value) -> Value:
        return self._define(a.type, f"and {a}, {b.name}")

    def bitwise_or(self, a: Value, b: Value) -> Value:
        return self._define(a.type, f"or {a}, {b.name}")

    def bitwise_xor(self, a: Value, b: Value) -> Value:
        return self._define(a.type, f"xor {a}, {b.name}")

    def bitwise_not(self, a: Value) -> Value:
        return self.bitwise_xor(a, a.type(-1))

    def multiply(self, a: Value, b: Value) -> Value:
        """Return the product of integers, truncated to their width."""
        return self._define(a.type, f"mul {a}, {b.name}")

    def shift_left(self, a: Value, bits: int) -> Value:
        return self._define(a.type, f"shl {a}, {a.type(bits).name}")

    def shift_right(self, a: Value, bits: int) -> Value:
        """Shift in zeros."""
        return self._define(a.type, f"lshr {a}, {a.type(bits).name}")

    def splat(self, a: Value, lanes: int) -> Value:
        """Return a vector with the scalar in every lane; the scalar itself for 0 lanes."""
        if not lanes:
            return a
        type_ = Type(a.type.element, lanes)
        first = self._define(type_, f"insertelement {type_} poison, {a}, i64 0")
        return self._define(type_, f"shufflevector {first}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def lane_numbers(self, type_: Type) -> Value:
        """Return the constant 0, 1, 2, ... of an integer type; 0 for a scalar."""
        text = ", ".join(f"{type_.element} {lane}" for lane in range(type_.lanes))
        return Value(type_, f"<{text}>" if type_.lanes else "0")

    def compare(self, predicate: str, a: Value, b: Value) -> Value:
        """Compare per lane; predicates as LLVM spells them: `slt`, `ne` for integers, `olt`, `oeq`, `uno` for
        floats.
        """
        return self._define(a.type.of("i1"), f"{'fcmp' if a.type.floating else 'icmp'} {predicate} {a}, {b.name}")

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self._define(a.type, f"select {condition}, {a}, {b}")

    def smaller(self, a: Value, b: Value) -> Value:
        """Return `a` if it is below `b`, else `b`: for floats one instruction, which returns `b` when `a` is NaN."""
        return self.select(self.compare("olt" if a.type.floating else "slt", a, b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        return self.select(self.compare("ogt" if a.type.floating else "sgt", a, b), a, b)

    def magnitude(self, a: Value) -> Value:
        return self.intrinsic("llvm.fabs", a.type, a)

    def add_square(self, a: Value, total: Value) -> Value:
        """Return `a * a + total`, fused where the machine supports it."""
        return self.intrinsic("llvm.fmuladd", a.type, a, a, total)

    def convert(self, how: str, a: Value, element: str) -> Value:
        """Convert to another element; `how` is LLVM's name: `fpext` widens a float, `zext` an integer, `bitcast`
        keeps bits.
        """
        type_ = a.type.of(element)
        return self._define(type_, f"{how} {a} to {type_}")

    def address(self, base: Value, element: str, index: Value) -> Value:
        return self._define(POINTER, f"getelementptr {element}, {base}, {index}")

    def load(self, type_: Type, address: Value, alignment: int) -> Value:
        return self._define(type_, f"load {type_}, {address}, align {alignment}")

    def store(self, value: Value, address: Value, alignment: int) -> None:
        self._line(f"store {value}, {address}, align {alignment}")

    def prefetch(self, address: Value) -> None:
        """Prefetch a cache line for reading; an invalid address does not fault."""
        self.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self._line(f"call void @llvm.prefetch.p0({address}, i32 0, i32 3, i32 1)")

    def reduce_lanes(self, join: str, a: Value) -> Value:
        """Reduce the lanes of a vector to one scalar by `add`, `min` or `max`."""
        scalar = Type(a.type.element)
        name = f"llvm.vector.reduce.{'f' if a.type.floating else ''}{join}"
        if not a.type.floating:
            return self.intrinsic(name, scalar, a)
        if join == "add":  # a float sum takes a start value, and «reassoc» frees it from adding lane after lane
            return self.intrinsic(name, scalar, scalar(-0.0), a, flags="reassoc ")
        return self.intrinsic(name, scalar, a, flags="nnan nsz ")

    def intrinsic(self, name: str, returns: Type, *arguments: Value, flags: str = "") -> Value:
        full = f"@{name}.{arguments[-1].type.suffix}"
        self.declarations.add(f"declare {returns} {full}({', '.join(str(a.type) for a in arguments)})")
        return self._define(returns, f"call {flags}{returns} {full}({', '.join(map(str, arguments))})")

    def call(self, function: str, *arguments: Value) -> Value:
        """Call one of our own functions and return the bit that it returns."""
        return self._define(BIT, f"call i1 @{function}({', '.join(map(str, arguments))})")

    def call_void(self, function: str, *arguments: Value) -> None:
        """Call one of our own functions that returns nothing."""
        self._line(f"call void @{function}({', '.join(map(str, arguments))})")

    def call_address(self, address: Value, *arguments: Value) -> None:
        """Call the function at an address known only at run time."""
        pointer = self._define(POINTER, f"inttoptr {address} to ptr")
        self._line(f"call void {pointer.name}({', '.join(map(str, arguments))})")

    def finish(self, result: Value | None = None) -> None:
        self._line(f"ret {result}" if result else "ret void")

    # Control

    def loop(
        self,
        span: tuple[Value, Value, int],
        initial: Mapping[Key, Value],
        body: Callable[[Value, dict[Key, Value]], dict[Key, Value]],
    ) -> dict[Key, Value]:
        """Emit `for index in range(*span)`: `body` gets the index and the running values and returns the next ones.

        Returns the running values after the last iteration, or the initial ones if there was none.
        """
        start, stop, step = span
        head, turn, done = self._label("head"), self._label("turn"), self._label("done")
        before = self._block
        self._branch(head)
        self._open(head)
        # The phis stand at the head but name values the body defines: leave room now, write them afterwards.
        index = self._name(WORD)
        running = {key: self._name(value.type) for key, value in initial.items()}
        room = len(self._lines)
        more = self.compare("slt", index, stop)
        self._line(f"br {more}, label %{turn}, label %{done}")
        self._open(turn)
        following = body(index, running)
        following_index = self.add(index, WORD(step))
        last = self._block
        self._branch(head)
        phis = [(index, start, following_index), *((running[key], initial[key], following[key]) for key in initial)]
        self._lines[room:room] = [
            f"  {value.name} = phi {value.type} [{first.name}, %{before}], [{later.name}, %{last}]"
            for value, first, later in phis
        ]
        self._open(done)
        return running

    def choose(self, condition: Value, then: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Emit `then() if condition else otherwise()`: only the instructions of the chosen branch run."""
        labels, after = (self._label("then"), self._label("else")), self._label("after")
        self._line(f"br {condition}, label %{labels[0]}, label %{labels[1]}")
        results, origins = [], []
        for label, branch in zip(labels, (then, otherwise), strict=True):
            self._open(label)
            results.append(branch())
            origins.append(self._block)
            self._branch(after)
        self._open(after)
        pairs = ", ".join(f"[{result.name}, %{origin}]" for result, origin in zip(results, origins, strict=True))
        return self._define(results[0].type, f"phi {results[0].type} {pairs}")

    # Text

    def _name(self, type_: Type) -> Value:
        self._names += 1
        return Value(type_, f"%v{self._names}")

    def _label(self, word: str) -> str:
        self._names += 1  # values and labels share one name space
        return f"{word}{self._names}"

    def _define(self, type_: Type, instruction: str) -> Value:
        value = self._name(type_)
        self._line(f"{value.name} = {instruction}")
        return value

    def _line(self, instruction: str) -> None:
        self._lines.append(f"  {instruction}")

    def _branch(self, label: str) -> None:
        self._line(f"br label %{label}")

    def _open(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label
