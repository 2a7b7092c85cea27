# SPDX-License-Identifier: Apache-2.0
"""What detectors can see of a run, as one small file: a `History` that can be examined again without training.

It contains no configuration, no fault and no truth. Numbers keep 12 binary digits (1 in 4,096), which is far below
their scatter; zeros, NaN, infinities and equal numbers are unchanged. The server's own keep all 24, since detectors
examine small differences between them. Of layer statistics it keeps `KEPT`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedvitals.errors import ConfigError
from fedvitals.protocols import History, Node
from fedvitals.records import Event
from fedvitals.stats import PEER_COLUMNS, Array

Small = npt.NDArray[np.float32]

KEPT: dict[str, tuple[str, ...]] = {
    "gradient": ("rms", "absmax", "nans", "infs", "sparsity", "count"),
    "gradient.steps": ("norm_max", "norm_max_step", "norm_last", "change_max"),
    "weight": ("rms", "absmax", "nans", "infs", "sum", "count"),
    "update": ("l2", "nans", "infs", "sparsity", "sum", "count"),
    "update.alignment": ("cosine_mean", "cosine_previous", "share"),
    "update.peers": PEER_COLUMNS,
    "buffer": ("min", "max", "nans", "infs"),
}
ABSENT = np.float32(-3e38)  # marks a missing value; NaN is a value
DIGITS = 12
SERVER = "server"


def rounded(values: Any) -> Small:
    """Round to `DIGITS` binary digits, so that files are small; counts, zeros and non-finite values are unchanged."""
    small = np.asarray(values, dtype=np.float64).astype(np.float32)
    bits = small.view(np.uint32)
    drop = 23 - DIGITS
    kept = ((bits + np.uint32(1 << (drop - 1))) >> np.uint32(drop)) << np.uint32(drop)
    return np.where(np.isfinite(small) & (small != np.round(small)), kept.view(np.float32), small)


@dataclass(eq=False)
class Recording:
    """A `protocols.History` of one run, from arrays [rounds × nodes]."""

    numbers: list[int]
    names: list[Node]
    metrics: dict[str, Small]  # [rounds, nodes]
    whole: dict[str, Small]  # [rounds]
    families: dict[str, Small]  # [rounds, nodes, layers, statistics of KEPT]
    tables: dict[str, tuple[str, ...]]  # layers of each family
    told: list[Event] = field(default_factory=list)

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, history: History, metrics: Sequence[str]) -> Recording:
        """Return what a history shows of these metrics and of the families in `KEPT`."""
        numbers, names = history.rounds(), history.nodes()
        place = {name: i for i, name in enumerate(names)}
        found, whole = {}, {}
        for metric in metrics:
            values = np.full((len(numbers), len(names)), float(ABSENT))
            for i, number in enumerate(numbers):
                for node, value in history.latest(metric, number).items():
                    values[i, place[node]] = value
            table = rounded(values)  # all at once; missing values stay missing
            if (table != ABSENT).any():
                found[metric] = table
            rounds, course = history.series(metric, None)
            if rounds:
                line: Small = np.full(len(numbers), ABSENT)
                line[[numbers.index(number) for number in rounds]] = rounded(course)
                whole[metric] = line
        families, tables = {}, {}
        for family, statistics in KEPT.items():
            layers = history.layers(family)
            if not layers:
                continue
            block = np.full((len(numbers), len(names), len(layers), len(statistics)), ABSENT)
            for i, number in enumerate(numbers):
                nodes, exact = history.across(family, statistics, number)
                for node, short, own in zip(nodes, rounded(exact), exact, strict=True):
                    block[i, place[node]] = own.astype(np.float32) if node == SERVER else short
            families[family], tables[family] = block, layers
        return cls(numbers, names, found, whole, families, tables, list(history.events()))

    def save(self, path: Path) -> None:
        about = {
            "numbers": self.numbers,
            "names": self.names,
            "tables": self.tables,
            "events": msgspec.to_builtins(self.told),
        }
        arrays = {f"metric/{name}": table for name, table in self.metrics.items()}
        arrays |= {f"whole/{name}": line for name, line in self.whole.items()}
        arrays |= {f"family/{name}": _planes(block) for name, block in self.families.items()}
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        draft = path.with_name(f"{path.name}.part")
        with draft.open("wb") as file:
            np.savez_compressed(file, about=text, **{name: _planes(table) for name, table in arrays.items()})  # type: ignore[arg-type]
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
                about = json.loads(arrays.pop("about").tobytes())
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read as a recording: {error}. Run the case again.") from error
        kinds: dict[str, dict[str, Small]] = {"metric": {}, "whole": {}, "family": {}}
        for name, table in arrays.items():
            kind, _, rest = name.partition("/")
            kinds[kind][rest] = table
        events = msgspec.convert(about["events"], list[Event])
        tables = {family: tuple(layers) for family, layers in about["tables"].items()}
        return cls(about["numbers"], about["names"], kinds["metric"], kinds["whole"], kinds["family"], tables, events)

    # -- History ------------------------------------------------------------------------------------------------------

    def rounds(self) -> list[int]:
        return list(self.numbers)

    def nodes(self) -> list[Node]:
        return list(self.names)

    def layers(self, family: str) -> tuple[str, ...]:
        return self.tables.get(family, ())

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        table = self.metrics.get(name)
        if table is None or round_index not in self.numbers:
            return {}
        row = table[self.numbers.index(round_index)]
        return {self.names[i]: float(row[i]) for i in np.flatnonzero(row != ABSENT)}

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        line = self.whole.get(name) if node is None else None
        if node is not None and name in self.metrics and node in self.names:
            line = self.metrics[name][:, self.names.index(node)]
        if line is None:
            return [], []
        there = np.flatnonzero(line != ABSENT)
        return [self.numbers[i] for i in there], [float(line[i]) for i in there]

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        if family not in self.families:
            return [], [], np.empty((0, 0))
        block = self.families[family][:, :, self.tables[family].index(layer), _column(family, statistic)]
        rounds, nodes = np.flatnonzero((block != ABSENT).any(1)), np.flatnonzero((block != ABSENT).any(0))
        values = np.where(block == ABSENT, np.nan, block.astype(np.float64))[np.ix_(rounds, nodes)]
        return [self.numbers[i] for i in rounds], [self.names[i] for i in nodes], values

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        if family not in self.families or round_index not in self.numbers:
            return [], np.empty((0, 0, len(statistics)))
        block = self.families[family][self.numbers.index(round_index)]
        nodes = np.flatnonzero((block != ABSENT).any(axis=(1, 2)))
        columns = [_column(family, statistic) for statistic in statistics]
        chosen = block[nodes][:, :, columns].astype(np.float64)
        return [self.names[i] for i in nodes], np.where(chosen == ABSENT, np.nan, chosen)

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        return [
            event
            for event in self.told
            if (name is None or event.name == name)
            and (since is None or (event.where.round is not None and event.where.round >= since))
        ]

    def until(self, round_index: int) -> Recording:
        """Return the recording as it was when that round had ended: for detectors that use «the newest»."""
        kept = sum(number <= round_index for number in self.numbers)
        return Recording(
            self.numbers[:kept],
            self.names,
            {name: table[:kept] for name, table in self.metrics.items()},
            {name: line[:kept] for name, line in self.whole.items()},
            {name: block[:kept] for name, block in self.families.items()},
            self.tables,
            [event for event in self.told if event.where.round is None or event.where.round <= round_index],
        )


def _column(family: str, statistic: str) -> int:
    try:
        return KEPT[family].index(statistic)
    except ValueError:
        raise ConfigError(
            f"A recording keeps of '{family}' only {', '.join(KEPT[family])}; got '{statistic}'. Add it to KEPT."
        ) from None


def _planes(table: Small) -> Small:
    """Return the table with rounds last in memory: a client's numbers change little between rounds, and compress
    better.
    """
    return np.asfortranarray(table)
