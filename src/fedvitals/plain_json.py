# SPDX-License-Identifier: Apache-2.0
"""Conversion to plain JSON: dictionaries, lists, texts, finite numbers, booleans and null.

JSON has neither NaN nor infinity. The rule, in this order:

- What people and other programs are shown (`--json`, HTTP, exported tables, alerts) has null instead.
- What is stored as text and read again (free-form data in a store, arguments of a trace) has their names, as texts.
- Records that wait in a file for their sink keep the number itself, in Python's own spelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

Fields = Mapping[Any, Any]
T = TypeVar("T")


def fields_of(value: Any) -> Fields | None:
    """Return the fields of a dataclass by name; None for anything else."""
    names = getattr(value, "__dataclass_fields__", None)
    return None if names is None else {name: getattr(value, name) for name in names}


def copied(kind: type[T], /, *sources: object, **own: Any) -> T:
    """Create a dataclass from attributes of the same names, each from the first source that has it, and from `own`."""
    for name in (name for name in kind.__dataclass_fields__ if name not in own):  # type: ignore[attr-defined]
        for source in sources:
            if hasattr(source, name):
                own[name] = getattr(source, name)
                break
    return kind(**own)


def no_fields(_: Any) -> Fields | None:
    """Treat no value as an object with fields."""
    return None


def unchanged(value: Any) -> Any:
    """Return a value unchanged."""
    return value


def null(_: float) -> None:
    """Replace a number that is not finite by null."""


def finite(number: float | None) -> float | None:
    """Return the number, or None if it is not finite or missing."""
    return number if number is not None and math.isfinite(number) else None


def word(number: float) -> str:
    """Replace a number that is not finite by its name: "NaN", "Infinity" or "-Infinity"."""
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN")


def as_builtin(value: Any, otherwise: Callable[[Any], Any] = str) -> Any:
    """Convert one level of a value that an encoder does not know: a dataclass, a mapping, or a NumPy array.

    For the hooks of encoders (`default` of json, `enc_hook` of msgspec). `otherwise` converts everything else.
    """
    fields = fields_of(value)
    if fields is not None or isinstance(value, Mapping):
        return dict(value if fields is None else fields)
    return value.tolist() if hasattr(value, "tolist") else otherwise(value)


@dataclass(frozen=True, slots=True)
class PlainJson:
    """A converter to plain JSON; calling it with a value returns the plain one. The defaults suit displays."""

    nonfinite: Callable[[float], Any] = null
    fields: Callable[[Any], Fields | None] = fields_of  # fields of a value that counts as a mapping
    unknown: Callable[[Any], Any] = unchanged  # applied to values without a JSON equivalent
    name: Callable[[Any], Any] = str  # the keys of mappings
    text: Callable[[str], str] = unchanged
    most: int | None = None  # entries of a mapping or a list
    absent: bool = True  # keep entries of mappings that are None
    depth: int = -1  # levels of mappings and lists; deeper ones are `unknown`; no limit if negative

    def __call__(self, value: Any) -> Any:
        return self._plain(value, self.depth)

    def _plain(self, value: Any, depth: int) -> Any:
        if type(value).__module__ == "numpy":
            value = value.tolist()
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else self.nonfinite(value)
        fields = self.fields(value)
        mapping = value if fields is None else fields
        if isinstance(mapping, Mapping) and depth:
            return {
                self.name(key): self._plain(entry, depth - 1)
                for key, entry in islice(mapping.items(), self.most)
                if self.absent or entry is not None
            }
        if isinstance(value, list | tuple | set | frozenset) and depth:
            return [self._plain(entry, depth - 1) for entry in islice(value, self.most)]
        return self.unknown(value)


shown = PlainJson()
