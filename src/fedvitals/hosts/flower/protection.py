# SPDX-License-Identifier: Apache-2.0
"""Detect secure aggregation and differential privacy; with them, nothing about a single client is reported.

Flower's mods do not know of each other. Inner ones are found in the closures of what a mod calls next, outer ones in
the frames that called it: each is wrapped by flwr's `make_ffn`, as the variable `_mod`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

MODS = ("secagg_mod", "secaggplus_mod", "fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod")
STRATEGIES = "DifferentialPrivacy"  # prefix of the names of Flower's wrappers
STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")  # of Flower's SecAgg+
LEVEL = 1  # the most that may be reported of such a federation: sums over many clients
DEEPEST = 100  # frames and mods examined


def hiding_mods(call_next: Any) -> list[str]:
    """Return the names of protecting mods around the caller and inside what it calls."""
    mods = (*_outside(), *_inside(call_next))
    names = [getattr(mod, "__name__", None) or type(mod).__name__ for mod in mods]
    return [name for name in names if name in MODS]


def hiding_strategy(strategy: Any) -> str | None:
    """Return the name of the wrapper that makes a strategy differentially private; None if there is none."""
    for kind in type(strategy).__mro__:
        if kind.__name__.startswith(STRATEGIES):
            return kind.__name__
    return None


def innermost(call_next: Any) -> Any:
    """Return what the mods wrap: the user's handler; for an app of the older API, its `client_fn`."""
    for _ in range(DEEPEST):
        inner = _closure(call_next)
        if {"_mod", "_ffn"} <= inner.keys():
            call_next = inner["_ffn"]
        elif "client_fn" in inner:
            call_next = inner["client_fn"]
        else:
            break
    return call_next


@dataclass(slots=True)
class SecureRound:
    """Progress of a round's secure aggregation. `stage`: the last one that clients were asked for, if any."""

    stage: str | None = None
    aggregated: bool = False  # whether the strategy received the sum, or raised while aggregating

    def sent(self, content: Mapping[str, Any]) -> None:
        """Note the stage of a request, if it belongs to secure aggregation."""
        if masked(content):
            stages = (record.get("stage") for record in content.values() if isinstance(record, Mapping))
            self.stage = next((str(stage) for stage in stages if stage is not None), self.stage or "")

    def is_halted(self, *, aggregation_seen: bool) -> bool:
        """Return whether the round's secure aggregation ended without a sum.

        `aggregation_seen`: whether it would be known if the strategy had received the sum.
        """
        if self.stage is None or self.aggregated:
            return False
        return aggregation_seen or self.stage in STAGES[:-1]


def masked(content: Mapping[str, Any]) -> bool:
    """Return whether a message belongs to secure aggregation, so that its content is noise to us."""
    return any("secagg" in str(key).lower() for key in content)


def _inside(call_next: Any) -> Iterator[Any]:
    for _ in range(DEEPEST):
        inner = _closure(call_next)
        if not {"_mod", "_ffn"} <= inner.keys():
            return
        yield inner["_mod"]
        call_next = inner["_ffn"]


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    values = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # it has no value yet
            values[name] = cell.cell_contents
    return values


def _outside() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to know who called
    for _ in range(DEEPEST):
        if frame is None:
            return
        if frame.f_code.co_name == "new_ffn" and "_mod" in frame.f_locals:
            yield frame.f_locals["_mod"]
        frame = frame.f_back
