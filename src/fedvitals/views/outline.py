# SPDX-License-Identifier: Apache-2.0
"""What several parts of a page need to know of a run, read once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvitals.catalog import meaning_of, unit_of
from fedvitals.records import Run, is_client, natural
from fedvitals.stats import FAMILIES, GROUP_ROWS, statistics_of
from fedvitals.store.marks import Mark, marks
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import SeriesByNode, series_of
from fedvitals.store.read.nodes import nodes_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import run_settings
from fedvitals.views.metric_titles import in_words, metric_title

OUTCOMES = ("accuracy", "loss", "local.accuracy", "local.loss")


@dataclass(frozen=True, slots=True)
class Known:
    """A metric that the run has values of."""

    name: str
    title: str  # for users
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class FamilyKnown:
    """A family of layer statistics that the run has."""

    name: str
    rows: str  # the type of its layers: parameters, modules
    statistics: tuple[str, ...]


def known_metric(name: str) -> Known:
    """Return a metric in the catalogue's words."""
    return Known(name, metric_title(name), unit_of(name), in_words(meaning_of(name)))


def known_families(reader: Reader, run: str) -> list[FamilyKnown]:
    """Read which families of statistics of its models' layers a run has; not those whose rows are classes or bands."""
    measured = queries.layer_families(reader, run)
    families = [name for name in measured if name in FAMILIES and FAMILIES[name].rows not in GROUP_ROWS]
    return [FamilyKnown(name, FAMILIES[name].rows, tuple(statistics_of(name))) for name in families]


@dataclass(frozen=True, slots=True)
class Outline:
    """What several parts of a page need to know of a run."""

    settings: Run  # without its layer tables and versions
    rounds: list[int]  # ascending
    nodes: Mapping[int, str]  # by their numbers in the store
    marks: Sequence[Mark]
    outcomes: SeriesByNode  # `OUTCOMES` as reported by the federation and its server

    @property
    def clients(self) -> list[str]:
        """The names of the run's clients, in natural order."""
        return sorted((node for node in self.nodes.values() if is_client(node)), key=natural)


def outline_of(reader: Reader, run: str) -> Outline:
    """Read the outline of a run; ConfigError if there is none with that id."""
    settings = run_settings(reader, run)
    return Outline(
        queries.get_run(reader, run) if settings is None else settings,  # its error lists the existing runs
        reader.history(run).rounds(),
        nodes_by_number(reader, run),
        marks(reader, run),
        series_of(reader, run, OUTCOMES, (None, "server")),
    )
