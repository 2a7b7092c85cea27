# SPDX-License-Identifier: Apache-2.0
"""Computes the health card of a run: its cases, its vital signs over the rounds, and the clients that stand out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

from fedvitals.catalog import LEVELS, unit_of
from fedvitals.diagnosis.abstentions import Examined
from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.diagnosis.evidence.outlier_ranking import NEWEST, Outlier, rank_outlier_clients, rank_outlier_layers
from fedvitals.protocols import History
from fedvitals.records import Event, Run, is_client
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import count_client_rounds
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import cases_of
from fedvitals.views.gaps import examination_of
from fedvitals.views.labels import labels_of
from fedvitals.views.matrix import rounds_not_finite
from fedvitals.views.unmeasured import Seldom, absent_metrics, seldom_measured

# What the card shows of a run, in the order of a medical chart: outcome, learning, gradients, weights, machine.
# The signs of language models and low-rank adapters only exist where there are any.
VITAL_SIGNS = (
    "accuracy", "loss", "held_back.loss", "perplexity.before", "perplexity.after", "fit.loss_before",
    "fit.accuracy_after", "gradient.norm", "gradient.norm_max", "gradient.norm_last", "update.norm",
    "update.cosine_mean", "adapter.effective_rank", "adapter.product_error", "adapter.energy_kept", "weight.drift",
    "weight.update_ratio", "throughput.tokens", "time.client", "time.round", "memory.resident",
)  # fmt: skip


TROUBLE = ("warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class Sign:
    """One vital sign over the rounds: the federation's own value, else the server's, else its median client's."""

    name: str
    unit: str
    rounds: Sequence[int]
    values: Sequence[float]
    of: str  # «federation», «server» or «median client»


@dataclass(frozen=True, slots=True)
class Card:
    """A run's health card."""

    run: Run
    summary: queries.RunSummary
    signs: Sequence[Sign]
    cases: Sequence[Case]  # the detectors' findings, each trouble once, worst first; without notes
    notes: int  # cases that never were more than a note
    detectors: int  # that examined the run
    examined: Examined | None  # what they examined; None: not recorded
    gaps: Sequence[str]  # why the run was not fully examined
    clients: Sequence[Outlier]
    layers: Sequence[Outlier]
    newest: Mapping[str | None, Mapping[str, float]]  # node → metrics, newest values of the last rounds
    events: Sequence[Event]  # the newest warnings and errors
    absent: Mapping[str, str]  # metric → what it needs
    cost_percent: float | None  # of measuring, relative to the rounds' time
    client_rounds: int  # of clients with a model
    measured: Mapping[str, int]  # probe that takes turns → number of client-rounds in which it measured
    seldom: Sequence[Seldom]  # likewise, with the samples and the budget of each
    privacy: str
    # The smallest number of clients whose sum may be reported; None: for runs older than this setting
    cohort: int | None
    tracebacks: bool | None
    labels: Mapping[str, str]  # node → its label beside the name


def health_card(reader: Reader, run: str) -> Card:
    """Read the health card of a run, by its id."""
    history, described = reader.history(run), queries.get_run(reader, run)
    lost = {name: rounds_not_finite(reader, run, name) for name in VITAL_SIGNS}
    signs = [sign for name in VITAL_SIGNS if (sign := vital_sign(history, name, lost[name])).rounds]
    newest: dict[str | None, dict[str, float]] = {}
    for number, table in reversed(queries.newest_rounds(reader, run, NEWEST).items()):
        for node, metrics in table.items():
            odd = {
                name: math.nan for name in VITAL_SIGNS if name in metrics and number in lost[name].get(node or "", ())
            }
            newest.setdefault(node, {}).update({**metrics, **odd})
    troubles = [event for level in TROUBLE for event in queries.events(reader, run, level=level)]
    summary = queries.summary_of(reader, run)
    seldom = seldom_measured(reader, run, str(setting_of(described, "probes", "")), history.rounds())
    level = int(setting_of(described, "privacy", 3))
    every_case = cases_of(reader, run, notes=True)
    troubles_found = [case for case in every_case if is_trouble(case)]
    examination = examination_of(reader, run)
    return Card(
        run=described,
        summary=summary,
        signs=signs,
        cases=troubles_found,
        notes=len(every_case) - len(troubles_found),
        detectors=detectors_of(described),
        examined=examination.examined,
        gaps=examination.gaps,
        clients=rank_outlier_clients(history),
        layers=rank_outlier_layers(history),
        newest=newest,
        events=sorted(troubles, key=lambda e: e.at),
        absent=absent_metrics(
            reader,
            run,
            set(queries.metric_names(reader, run)),
            level=level,
            hides=bool(setting_of(described, "hides", False)),
        ),
        cost_percent=cost_percent(history),
        client_rounds=count_client_rounds(reader, run, ("steps",)).get("steps", 0),
        measured={own.probe: own.measured for own in seldom},
        seldom=seldom,
        privacy=f"{level}: {LEVELS[level]}",
        cohort=setting_of(described, "cohort", None),
        tracebacks=setting_of(described, "tracebacks", None),
        labels=labels_of(reader, run),
    )


def detectors_of(run: Run) -> int:
    """Return how many detectors examined a run while it trained."""
    return int(setting_of(run, "detectors", 0))


def vital_sign(history: History, name: str, lost: Mapping[str, set[int]] = MappingProxyType({})) -> Sign:
    """Return the federation's own values, else the server's, else each round's median over the clients.

    `lost`: the rounds in which a client's value is not finite, whatever is stored (`views.not_finite`).
    """
    unit = unit_of(name)
    for node in (None, "server"):
        rounds, values = history.series(name, node)
        if rounds:
            return Sign(name, unit, rounds, values, node or "federation")
    cohort: dict[int, list[float]] = {}
    for number in history.rounds():
        latest = {node: value for node, value in history.latest(name, number).items() if is_client(node)}
        if latest:
            cohort[number] = [v for node, v in latest.items() if math.isfinite(v) and number not in lost.get(node, ())]
    medians = [median(finite) if finite else math.nan for finite in cohort.values()]
    return Sign(name, unit, [*cohort], medians, "median client")


def how_often(card: Card) -> str:
    """Return a sentence on how often the probes that take turns measured, and why; empty if none did."""
    return f"Measured in turns: {'; '.join(own.text for own in card.seldom)}." if card.seldom else ""


def cost_percent(history: History) -> float | None:
    """Return the cost of measuring in percent of the rounds' time."""
    (_, costs), (_, times) = history.series("monitor.cost", None), history.series("time.round", None)
    return percent_of(costs, times)


def percent_of(costs: Iterable[float], times: Iterable[float]) -> float | None:
    """Return the sum of these costs in percent of the sum of these times; None if no time is known."""
    return 100 * float(sum(costs)) / float(sum(times)) if sum(times) > 0 else None


def setting_of(run: Run, name: str, default: Any) -> Any:
    """Return a setting of the run's monitor."""
    ours = run.config.get("fedvitals", {})
    return ours.get(name, default) if isinstance(ours, Mapping) else default
