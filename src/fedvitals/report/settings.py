# SPDX-License-Identifier: Apache-2.0
"""The report's settings, as flat paths and readable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fedvitals.records import Run
from fedvitals.report.markup import Block, Folded, Table, Text, literal
from fedvitals.views.comparison.runs import all_settings

MOST = 80  # rows of a table
LONGEST = 120  # characters of a value


def flat(name: str, value: Any) -> dict[str, Any]:
    """Return a setting as one or several without parts («faults.0.kind»); a list of plain values stays one setting."""
    if isinstance(value, Mapping) and value:
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(part, Mapping | list | tuple) for part in value):
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        return {name: value}
    return {path: leaf for key, part in parts for path, leaf in flat(f"{name}.{key}", part).items()}


def readable(value: Any) -> str:
    """Return a value without quotes and brackets."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | Mapping):
        return ", ".join(map(readable, value)) or "none"
    return literal(value, LONGEST)


def settings_part(groups: Sequence[Sequence[Run]], letters: Sequence[str]) -> tuple[Block, Folded | None]:
    """Return the settings that differ between sides, with defaults shown as such, and those they have in common."""
    tables: list[dict[str, Any]] = [{} for _ in groups]
    defaults: dict[str, tuple[bool, ...]] = {}
    for setting in all_settings(groups):
        if setting.name == "model":
            continue  # shown as a line for each layer instead
        defaults[setting.name] = setting.defaults
        for table, value in zip(tables, setting.values, strict=True):
            table.update(flat(setting.name, value))
    for table, group in zip(tables, groups, strict=True):
        table.update(_model(group[0]))
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = {name: [table.get(name) for table in tables] for name in names}
    differing = {name: values for name, values in rows.items() if any(value != values[0] for value in values)}
    same = {
        name: values[0]
        for name, values in rows.items()
        if name not in differing and values[0] is not None and not name.startswith("model.")
    }
    if differing:
        shown = [
            (literal(name, LONGEST), *_values(values, defaults.get(name, ()))) for name, values in differing.items()
        ]
        difference: Block = _table("Why: settings that differ", ("setting", *letters), shown)
    else:
        difference = Text("No setting, seed or version differs: what differs lies outside of them.")
    shown = [(literal(name, LONGEST), readable(value)) for name, value in same.items()]
    title = f"{len(same)} settings that are the same in all"
    return difference, Folded(title, (_table("", ("setting", "value"), shown),)) if same else None


def _values(values: Sequence[Any], defaults: Sequence[bool]) -> list[str]:
    """Return values such as «10 (default)», «8»."""
    known = defaults or [False] * len(values)
    return [f"{readable(value)}{' (default)' * default}" for value, default in zip(values, known, strict=True)]


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    more = len(rows) - MOST
    return Table(title, head, tuple(rows[:MOST]), f"and {more} more" if more > 0 else "")


def _model(run: Run) -> dict[str, str]:
    """Return the size of the model, and the shape of each layer."""
    layers = [layer for table in run.tables if table.rows == "parameter" for layer in table.layers]
    if not layers:
        return {}
    weights = sum(prod(layer.shape) for layer in layers)
    shapes = {f"model.{layer.name}": "×".join(map(str, layer.shape)) or "1" for layer in layers}
    return {"model": f"{len(layers)} layers, {weights} weights", **shapes}
