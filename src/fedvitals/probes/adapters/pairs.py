# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters, recognised by structure: a layer W becomes W + (α/r) B A, with A [r, in] and B [out, r].

A pair is recognised by its names (those of peft and of common LoRA files), or by its shapes: the only two trained
matrices of a module, small in their common dimension, next to a frozen matrix [out, in]. α/r is an attribute of the
module that holds the pair. Everything else that trains (prompts, prefixes, heads, bottlenecks) is not a pair, and is
measured like any other layer. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
NamedShapes = Sequence[tuple[str, Shape]]

# What tells A from B in a part of a name that says «lora», such as lora_A, lora_down or q_lora_a; or that is just A.
_B_OF = {"A": "B", "a": "b", "down": "up"}
_SIDE = re.compile(r"(?<![A-Za-z0-9])(A|a|down)(?![A-Za-z0-9])")
_DIAGONAL = "lora_E"  # in AdaLoRA, whose product has a third factor
_PROMPT = re.compile(r"(^|[._])(prompt|prefix)")
SCALES = ("scaling", "scale")  # attributes that hold α/r
ALPHAS, RANKS = ("lora_alpha", "alpha"), ("r", "rank")


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """One low-rank adapter: its layer's name, the names of A and B, and their shapes as matrices."""

    name: str
    a: str
    b: str
    rank: int
    inputs: int
    outputs: int


def find_pairs(trained: NamedShapes, frozen: NamedShapes = ()) -> tuple[AdapterPair, ...]:
    """Return the low-rank pairs among named shapes, in the order of what trains of them. `frozen`: what does not train.

    One side of a pair may be frozen, if its name tells what it is: some train B alone, or A and B in turns.
    """
    by_name = _by_names(dict(trained), dict(frozen))
    used = {name for pair in by_name for name in (pair.a, pair.b)}
    by_shape = _by_shapes([(name, shape) for name, shape in trained if name not in used], frozen)
    order = {name: place for place, (name, _) in enumerate(trained)}
    return tuple(
        sorted((*by_name, *by_shape), key=lambda pair: min(order.get(n, len(order)) for n in (pair.a, pair.b)))
    )


def _by_names(trained: Mapping[str, Shape], frozen: Mapping[str, Shape]) -> list[AdapterPair]:
    pairs, shapes = [], {**frozen, **trained}
    for name, shape in shapes.items():
        parts = name.split(".")
        for place, part in enumerate(parts):
            counterpart, rest = _counterpart(part)
            other = ".".join([*parts[:place], counterpart, *parts[place + 1 :]])
            if not counterpart or other not in shapes or not {name, other} & trained.keys():
                continue
            if any(own.startswith(".".join([*parts[:place], _DIAGONAL])) for own in shapes):
                break
            # If a layer has several adapters (peft), each one's name belongs to its own parameters.
            own_name = [part for part in (*rest, *parts[place + 1 :]) if part not in ("weight", "default")]
            layer, sides = ".".join([*parts[:place], *own_name]), ((name, shape), (other, shapes[other]))
            # Written as x A B, with A [in, r] and B [r, out], the product is transposed: B is on its right.
            pair = _pair(layer, *sides) or _pair(layer, *sides[::-1])
            pairs += [] if pair is None else [pair]
            break
    return pairs


@functools.lru_cache(4096)
def _counterpart(part: str) -> tuple[str, list[str]]:
    """Return the name of B for a part of a name of A, empty if it is none; and what else the part says."""
    side = _SIDE.search(part) if part == "A" or "lora" in part.lower() else None
    if side is None:
        return "", []
    words = (part[: side.start()] + part[side.end() :]).split("_")
    rest = "_".join(word for word in words if word and word.lower() not in ("lora", "embedding"))
    return part[: side.start()] + _B_OF[side[1]] + part[side.end() :], [rest] if rest else []


def _by_shapes(trained: NamedShapes, frozen: NamedShapes) -> list[AdapterPair]:
    """Return the pairs of modules that train only two matrices, next to a frozen matrix of their product's shape.

    That matrix is in the same module or, alone, in the one around it.
    """
    groups: dict[str, list[tuple[str, Shape]]] = defaultdict(list)
    for name, shape in trained:
        groups[_module_of(name)].append((name, shape))
    bases: dict[str, list[Shape]] = defaultdict(list)
    for name, shape in frozen:
        for module in {name.rpartition(".")[0], _module_of(name)} if len(shape) > 1 else ():
            bases[module].append(shape)
    pairs = []
    for module, own in groups.items():
        around = bases.get(module.rpartition(".")[0], []) if module else []
        beside = bases.get(module) or around
        if len(own) != 2 or not beside or (beside is around and len(around) > 1):
            continue
        candidates = [_pair(module, *sides) for sides in (own, own[::-1])]
        fitting = [
            p for p in candidates if p is not None and {(p.outputs, p.inputs), (p.inputs, p.outputs)} & {*beside}
        ]
        # If A and B could be exchanged, only names would distinguish them.
        pairs += fitting if len(fitting) == 1 else []
    return pairs


def _module_of(name: str) -> str:
    """Return the module that holds a parameter; for a linear layer's weight, the module around that layer."""
    module, _, last = name.rpartition(".")
    return module.rpartition(".")[0] if last in ("weight", "bias") else module


def _pair(name: str, a: tuple[str, Shape], b: tuple[str, Shape]) -> AdapterPair | None:
    """Return A and B as a pair if their shapes fit; a convolution counts as the matrix of its weights."""
    if len(a[1]) < 2 or len(b[1]) < 2 or math.prod(b[1][2:]) != 1:
        return None
    rank, inputs, outputs = a[1][0], math.prod(a[1][1:]), b[1][0]
    # A rank that saves nothing does not belong to an adapter.
    fits = b[1][1] == rank and rank > 0 and rank * (inputs + outputs) <= inputs * outputs
    return AdapterPair(name, a[0], b[0], rank, inputs, outputs) if fits else None


def other_kinds(trained: Iterable[str], pairs: Sequence[AdapterPair]) -> dict[str, int]:
    """Return how many trained tensors do not belong to a pair, by kind: «prompt» and «other»."""
    used = {name for pair in pairs for name in (pair.a, pair.b)}
    kinds = {"prompt": 0, "other": 0}
    for name in trained:
        if name not in used:
            kinds["prompt" if _PROMPT.search(name) else "other"] += 1
    return {kind: count for kind, count in kinds.items() if count}


def describe_trained(trained: Sequence[str], frozen: NamedShapes, pairs: Sequence[AdapterPair]) -> str:
    """Return a sentence on what trains of a model: its low-rank adapters, and what else."""
    kinds = other_kinds(trained, pairs)
    prompts, others = kinds.get("prompt", 0), kinds.get("other", 0)
    parts = [f"{count} {words}" for count, words in ((prompts, "of prompts or prefixes"), (others, "others")) if count]
    share = f"{len(trained)} of {len(trained) + len(frozen)} tensors train{'s' * (len(trained) == 1)}"
    if not pairs:
        named = f" ({', '.join(parts)})" if prompts else ""
        resting = len(_by_names(dict(frozen), {}))
        rest = f"; {resting} low-rank adapter{'s are' if resting > 1 else ' is'} frozen" if resting else ""
        return f"{share}{named}; none is the A or B of a low-rank adapter{rest}."
    ranks = sorted({pair.rank for pair in pairs})
    words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    beside = f"; beside them, {', '.join(parts)}" if parts else ""
    return f"{share}: {len(pairs)} low-rank adapter{'s' * (len(pairs) > 1)} of {words}{beside}."


def scale_of(model: Any, pair: AdapterPair) -> float | None:
    """Return α/r of a pair in a model, from the module that holds it; None if that has none."""
    try:
        get_holder, adapter = _holder(pair)
        module = model if get_holder is None else get_holder(model)
    except AttributeError:
        return None
    scale = _first_number(module, SCALES, adapter)
    if scale is not None:
        return scale
    alpha = _first_number(module, ALPHAS, adapter)
    return alpha / (_first_number(module, RANKS, adapter) or pair.rank) if alpha is not None else None


def is_active(model: Any, pair: AdapterPair) -> bool:
    """Return whether a model uses a pair: in peft, layers may have several adapters and use some of them."""
    try:
        get_holder, adapter = _holder(pair)
        active = (model if get_holder is None else get_holder(model)).active_adapters
    except AttributeError:
        return True
    return not isinstance(active, list | tuple) or adapter in active


@functools.lru_cache(4096)
def _holder(pair: AdapterPair) -> tuple[Callable[[Any], Any] | None, str]:
    """Return a getter of the module that A and B belong to (None: the model itself), and the adapter's name."""
    common = []
    for own, other in zip(pair.a.split("."), pair.b.split("."), strict=True):
        if own != other:
            break
        common.append(own)
    path = ".".join(common)
    return operator.attrgetter(path) if path else None, pair.name.removeprefix(path).strip(".") or "default"


def _first_number(module: Any, names: Sequence[str], adapter: str) -> float | None:
    """Return the first of a module's attributes that is a number; a module is slow to report that it has none."""
    own, kind = getattr(module, "__dict__", {}), type(module)
    known = (_number(getattr(module, name), adapter) for name in names if name in own or hasattr(kind, name))
    return next((number for number in known if number is not None), None)


def _number(attribute: Any, adapter: str) -> float | None:
    """Return a positive number; from a mapping, as in peft, that of this adapter."""
    if isinstance(attribute, Mapping):
        attribute = attribute.get(adapter, next(iter(attribute.values()), None) if len(attribute) == 1 else None)
    usable = isinstance(attribute, int | float) and not isinstance(attribute, bool)
    return float(attribute) if usable and math.isfinite(attribute) and attribute > 0 else None
