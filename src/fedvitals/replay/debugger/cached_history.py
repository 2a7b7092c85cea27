# SPDX-License-Identifier: Apache-2.0
"""A cache in front of a history that no longer changes, because walking over rounds asks for the same again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedvitals.protocols import History, Node
from fedvitals.records import Event
from fedvitals.stats import Array


class CachedHistory:
    """A `protocols.History` that asks another one only once for each thing."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._known: dict[tuple[Any, ...], Any] = {}

    def _once(self, method: str, *arguments: Any) -> Any:
        key = (method, *arguments)
        if key not in self._known:
            self._known[key] = getattr(self._history, method)(*arguments)
        return self._known[key]

    def rounds(self) -> list[int]:
        rounds: list[int] = self._once("rounds")
        return rounds

    def nodes(self) -> list[Node]:
        nodes: list[Node] = self._once("nodes")
        return nodes

    def layers(self, family: str) -> tuple[str, ...]:
        layers: tuple[str, ...] = self._once("layers", family)
        return layers

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        values: Mapping[Node, float] = self._once("latest", name, round_index)
        return values

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        series: tuple[list[int], list[float]] = self._once("series", name, node)
        return series

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        matrix: tuple[list[int], list[Node], Array] = self._once("matrix", family, statistic, layer)
        return matrix

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        return self._history.across(family, statistics, round_index)  # large, and each is asked for once

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        events: Sequence[Event] = self._once("events", name)
        if since is None:
            return events
        return [event for event in events if event.where.round is not None and event.where.round >= since]
