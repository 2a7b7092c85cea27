# SPDX-License-Identifier: Apache-2.0
"""A quantity that a person names, such as «update.norm of c7», and its values in this and earlier rounds."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.medians import finite_median
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import History
from fedvitals.records import is_client
from fedvitals.stats import FAMILIES, statistics_of

ANY = "any client"
STATISTIC_ALIASES = {"norm": "l2"}  # what people say, and what the statistic is called
QUALITY = ("accuracy", "loss", "local.accuracy", "local.loss")  # of a federation, also where only clients told it
PastValues = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A value in one round. `past` returns the values of earlier rounds, and reads them only when called."""

    label: str
    node: str | None
    value: float
    past: Callable[[], PastValues]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A metric of the catalogue, of one node (None: the federation), or a statistic of one layer."""

    name: str
    node: str | None = None
    layer: str | None = None

    def __str__(self) -> str:
        if self.layer is not None:
            return f"{self.name} of layer {quoted(self.layer)}" + (f" in {quoted(self.node)}" if self.node else "")
        return f"{self.name} of {quoted(self.node)}" if self.node else self.name

    @property
    def is_share(self) -> bool:
        """Return whether it lies between 0 and 1, so that per cent and points of it make sense."""
        return self.layer is None and self.name in CATALOG and CATALOG[self.name].unit == "share"

    def check(self, history: History) -> None:
        """Raise ConfigError, listing what exists, if a finished run has no such node or layer."""
        nodes = history.nodes()
        if self.node not in (None, ANY) and nodes and self.node not in nodes:
            family = self.name.rpartition(".")[0]
            layers = history.layers(family) if family in FAMILIES else ()
            hint = f" For a layer, write «{self.name} of layer {self.node}»."
            is_layer = _layer_named(layers, str(self.node)) is not None
            raise ConfigError(unknown("node", str(self.node), nodes) + (hint if is_layer else ""))
        if self.layer is not None:
            family, _ = _statistic(self.name)
            layers = history.layers(family)
            if layers and _layer_named(layers, self.layer) is None:
                raise ConfigError(unknown(f"layer of family '{family}'", self.layer, layers))

    def readings(self, history: History, round_index: int) -> Iterator[Reading]:
        """Yield its values in a round: one, or one per client for any client; none where it was not measured."""
        if self.layer is not None:
            yield from self._of_layer(history, round_index)
        elif self.node not in (None, ANY):
            yield from self._of_node(history, self.node, round_index)
        else:
            yield from self._of_all(history, round_index)

    def _of_node(self, history: History, node: str | None, round_index: int) -> Iterator[Reading]:
        rounds, values = history.series(self.name, node)
        if round_index in rounds:
            label = f"{self.name} of {node}" if node else self.name
            past = [(r, v) for r, v in zip(rounds, values, strict=True) if r < round_index]
            yield Reading(label, node, values[rounds.index(round_index)], lambda: past)

    def _of_all(self, history: History, round_index: int) -> Iterator[Reading]:
        """Yield the federation's value, else the server's; else the median for quality metrics, or each client's
        value.
        """
        for whole in (None, "server") if self.node is None else ():
            if history.series(self.name, whole)[0]:
                yield from self._of_node(history, whole, round_index)
                return
        clients = {node: value for node, value in history.latest(self.name, round_index).items() if is_client(node)}
        if self.node is None and self.name in QUALITY:
            if clients:
                earlier = [r for r in history.rounds() if r < round_index]
                label = f"{self.name} (median of the clients)"
                yield Reading(label, None, finite_median(clients.values()), lambda: self._medians(history, earlier))
            return
        for node, value in clients.items():
            past = functools.partial(self._before, history, node, round_index)
            yield Reading(f"{self.name} of {node}", node, value, past)

    def _before(self, history: History, node: str, round_index: int) -> PastValues:
        return [(r, v) for r, v in zip(*history.series(self.name, node), strict=True) if r < round_index]

    def _medians(self, history: History, rounds: Sequence[int]) -> PastValues:
        values_by_round = ((r, [v for n, v in history.latest(self.name, r).items() if is_client(n)]) for r in rounds)
        return [(r, finite_median(values)) for r, values in values_by_round if values]

    def _of_layer(self, history: History, round_index: int) -> Iterator[Reading]:
        family, statistic = _statistic(self.name)
        layer = _layer_named(history.layers(family), str(self.layer))
        if layer is None:
            return
        rounds, nodes, values = history.matrix(family, statistic, layer)
        if round_index not in rounds:
            return
        row = rounds.index(round_index)
        for column, node in enumerate(nodes):
            if node != self.node if self.node not in (None, ANY) else not is_client(node):
                continue
            value = float(values[row, column])
            if not math.isnan(value):  # it took no part
                past = [(r, float(values[i, column])) for i, r in enumerate(rounds) if r < round_index]
                yield Reading(f"{self.name} of {layer} in {node}", node, value, lambda past=past: past)  # type: ignore[misc]


def quantity_of(name: str, node: str | None = None, layer: str | None = None) -> Quantity:
    """Return the quantity of this name. Raises ConfigError, with suggestions, for an unknown one."""
    spelling = " ".join(name.lower().split())
    family_first = spelling.replace(" ", ".", 1).replace(" ", "_")
    spellings = (spelling, spelling.replace(" ", "."), spelling.replace(" ", "_"), family_first)
    if layer is not None:
        known_name = next((candidate for candidate in spellings if _is_statistic(candidate)), None)
        if known_name is None:
            raise ConfigError(_unknown_statistic(spelling))
        return Quantity(known_name, node, layer)
    known_name = next((candidate for candidate in spellings if candidate in CATALOG), None)
    if known_name is None and spelling.startswith("user."):
        known_name = name.strip()
    if known_name is None:
        raise ConfigError(_unknown_metric(spelling))
    return Quantity(known_name, node)


def quoted(name: str) -> str:
    """Return a name as it must be written in a sentence."""
    return f'"{name}"' if " " in name and name != ANY else name


def finite_values(past: PastValues) -> list[float]:
    """Return the finite ones of past values."""
    return [value for _, value in past if math.isfinite(value)]


def _is_statistic(name: str) -> bool:
    family, statistic = _statistic(name)
    return family in FAMILIES and statistic in statistics_of(family)


def _statistic(name: str) -> tuple[str, str]:
    family, _, statistic = name.rpartition(".")
    return family, STATISTIC_ALIASES.get(statistic, statistic)


def _layer_named(layers: Sequence[str], word: str) -> str | None:
    """Return the layer of that name; for a module's name, its weight, else its first parameter."""
    if word in layers:
        return word
    inside = [layer for layer in layers if layer.startswith(f"{word}.")]
    return next((layer for layer in inside if layer == f"{word}.weight"), inside[0] if inside else None)


def _unknown_metric(word: str) -> str:
    if _is_statistic(word):
        return f"'{word}' is a statistic of layers: name one, as in «{word} of layer conv1 in c7»."
    close = difflib.get_close_matches(word, CATALOG, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
    return f"Unknown metric '{word}'.{hint} docs/metrics.md has them all; what you logged yourself is 'user.{word}'."


def _unknown_statistic(word: str) -> str:
    family = word.rpartition(".")[0]
    if family in FAMILIES:
        known = [*statistics_of(family), *STATISTIC_ALIASES]
        return unknown(f"statistic of family '{family}'", word.rpartition(".")[2], known)
    return unknown("family of layer statistics", family or word, FAMILIES)
