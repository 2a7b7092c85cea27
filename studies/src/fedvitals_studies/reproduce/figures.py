# SPDX-License-Identifier: Apache-2.0
"""The counterparts of the paper's Figures 6 to 29: what each shows, from which conditions.

A missing condition or series is left out of its figure, and the figure says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.plot.style import COLOURS
from fedvitals_studies.reproduce.conditions import SCENARIOS, TOPOLOGIES
from fedvitals_studies.reproduce.plot import POINTS, Line, Panel, data_of, svg_of
from fedvitals_studies.reproduce.results import Results, as_json, objections

Panels = Callable[[Results], list[Panel]]
BLUE, VERMILLION, GREEN, PURPLE = COLOURS[:4]
TOPOLOGY_COLOURS = dict(zip(TOPOLOGIES, (BLUE, GREEN, VERMILLION, PURPLE), strict=True))
SCENARIO_COLOURS = dict(zip(SCENARIOS, (BLUE, VERMILLION, GREEN), strict=True))
LAYER_COLOURS = {"1": BLUE, "2": GREEN, "3": VERMILLION}
ITERATION = "iteration, over all rounds"
GSC = "GSC: scale.gsc, ‖logits‖ over ‖input‖"
SENSITIVITY = "other reading: scale.sensitivity"


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # fig06, beyond1
    title: str
    conditions: tuple[str, ...]
    panels: Panels
    adds: str = ""  # for a figure that the paper does not have: its purpose

    @property
    def number(self) -> int | None:
        """The paper's number."""
        return int(self.name[3:]) if self.name.startswith("fig") else None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as files, and the facts behind it."""

    figure: Figure
    svg: str
    facts: dict[str, Any]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.figure.conditions if not self.facts["repeats"].get(name))

    @property
    def objections(self) -> list[str]:
        return list(self.facts["objections"])

    @property
    def longest(self) -> int:
        """Return the points of its longest line, of which the plot shows at most POINTS."""
        return max((line["points"] for panel in self.facts["panels"] for line in panel["lines"]), default=0)


def lines(results: Results, wanted: Iterable[tuple[str, str, str | None, str, str, bool]]) -> tuple[Line, ...]:
    """Return the lines for (condition, series, part, label, colour, dashed) that exist."""
    return tuple(
        Line(label, results.stack(condition, name, part), colour, dashed)
        for condition, name, part, label, colour, dashed in wanted
        if results.has(condition, name, part)
    )


def draw(figure: Figure, results: Results) -> Drawn | None:
    """Return the figure, or None if nothing in it has been measured."""
    panels = figure.panels(results)
    if not any(panel.lines for panel in panels):
        return None
    used = [result for condition in figure.conditions for result in results.of(condition)]

    def all_of(fact: str) -> list[Any]:
        return sorted({result[fact] for result in used})

    facts = {
        "figure": figure.name,
        "title": figure.title,
        "datasets": all_of("dataset"),
        "digests": all_of("digest"),
        "clients": all_of("clients"),
        "rounds": all_of("rounds"),
        "repeats": {condition: len(results.repeats(condition)) for condition in figure.conditions},
        "seeds": all_of("seed"),
        "commits": all_of("commit"),
        "engines": all_of("engine"),
        "objections": objections(used),
        "panels": data_of(panels),
    }
    return Drawn(figure, svg_of(panels, figure.title, columns=min(2, len(panels))), facts)


def write(drawn: Drawn, folder: Path) -> None:
    """Write the plot, and its numbers beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{drawn.figure.name}.svg").write_text(drawn.svg, encoding="utf-8")
    (folder / f"{drawn.figure.name}.json").write_text(as_json(drawn.facts), encoding="utf-8")


def _topologies(clipped: str) -> Panels:
    def panels(results: Results) -> list[Panel]:
        return [
            Panel(
                f"{where} accuracy",
                lines(
                    results,
                    [
                        (f"initial-{topology}-{clipped}", f"{where}.accuracy", None, topology, colour, False)
                        for topology, colour in TOPOLOGY_COLOURS.items()
                    ],
                ),
                "accuracy",
                scale="share",
                runs=True,
            )
            for where in ("server", "aggregated")
        ]

    return panels


def _edges(clipped: str, *shown: tuple[str, str]) -> Panels:
    """Return one row per repeat, since the jumps occur in different places; one line per edge."""
    condition = f"initial-hierarchical-{clipped}"

    def panels(results: Results) -> list[Panel]:
        found = []
        for repeat in results.repeats(condition):
            for name, words in shown:
                measured = results.has(condition, name) and repeat in results.repeats(condition, name)
                edges = results.keys(condition, name) if measured else ()
                drawn = tuple(
                    Line(edge, results.array(condition, name, edge, repeat)[None], COLOURS[place % len(COLOURS)])
                    for place, edge in enumerate(edges)
                )
                found.append(Panel(f"{words}, run {repeat + 1}", drawn, words.split(",")[0], ITERATION, "auto"))
        return found

    return panels


def _accuracy_and_loss(condition: str) -> Panels:
    def panels(results: Results) -> list[Panel]:
        def pair(what: str) -> tuple[Line, ...]:
            return lines(
                results,
                [
                    (condition, f"aggregated.{what}", None, "aggregated", BLUE, False),
                    (condition, f"server.{what}", None, "server", VERMILLION, True),
                ],
            )

        return [
            Panel("accuracy", pair("accuracy"), "accuracy", scale="share", runs=True),
            Panel("loss", pair("loss"), "cross-entropy, nats", scale="auto", runs=True),
        ]

    return panels


def _scale(topology: str, *shown: tuple[str, str, str]) -> Panels:
    """Return panels for each (series, title, x axis), with the three scenarios as lines."""

    def panels(results: Results) -> list[Panel]:
        return [
            Panel(
                title,
                lines(
                    results,
                    [
                        (f"extended-{topology}-{scenario}", name, None, scenario, colour, False)
                        for scenario, colour in SCENARIO_COLOURS.items()
                    ],
                ),
                "mean over the cohort",
                x,
                "log",
            )
            for name, title, x in shown
        ]

    return panels


def _layers(condition: str, prefix: str, x: str) -> Panels:
    def panels(results: Results) -> list[Panel]:
        def three(reading: str) -> tuple[Line, ...]:
            name = f"{prefix}.{reading}"
            wanted = [(condition, name, key, f"layer {key}", c, False) for key, c in LAYER_COLOURS.items()]
            return lines(results, wanted)

        return [
            Panel("signed mean", three("mean"), "mean of the gradient", x),
            Panel("mean magnitude", three("magnitude"), "mean of |gradient|", x, "log"),
        ]

    return panels


def _paper() -> tuple[Figure, ...]:
    unclipped = tuple(f"initial-{topology}-unclipped" for topology in TOPOLOGIES)
    clipped = tuple(f"initial-{topology}-clipped" for topology in TOPOLOGIES)
    loss = ("iteration.loss", "mean loss, nats")
    differences = (
        ("iteration.difference", "sum of weight differences, signed"),
        ("iteration.difference_absolute", "sum of weight differences, absolute"),
    )
    figures = [
        Figure("fig06", "Four topologies without clipping", unclipped, _topologies("unclipped")),
        Figure("fig07", "Mean loss of each edge, unclipped", unclipped[2:3], _edges("unclipped", loss)),
        Figure("fig08", "Weight differences of each edge, unclipped", unclipped[2:3],
               _edges("unclipped", *differences)),
        Figure("fig09", "Mean loss of each edge, clipped", clipped[2:3], _edges("clipped", loss)),
        Figure("fig10", "Weight differences of each edge, clipped", clipped[2:3], _edges("clipped", *differences)),
        Figure("fig11", "Four topologies with clipping", clipped, _topologies("clipped")),
    ]  # fmt: skip
    number = 12
    for topology in ("centralized", "hierarchical"):
        for scenario in SCENARIOS:
            condition = f"extended-{topology}-{scenario}"
            title = f"Accuracy and loss, {topology}, {scenario}"
            figures.append(Figure(f"fig{number}", title, (condition,), _accuracy_and_loss(condition)))
            number += 1
    both = (("scale.gsc", GSC, "round"), ("scale.sensitivity", SENSITIVITY, "round"))
    every = (("iteration.gsc", GSC, ITERATION),)
    for topology, title, shown in (
        ("centralized", "GSC of the three scenarios, centralized", both),
        ("hierarchical", "GSC of the three scenarios, hierarchical, every iteration", every),
        ("hierarchical", "GSC of the three scenarios, hierarchical, last iterations only", both),
    ):
        conditions = tuple(f"extended-{topology}-{scenario}" for scenario in SCENARIOS)
        figures.append(Figure(f"fig{number}", title, conditions, _scale(topology, *shown)))
        number += 1
    for topology, prefix, x, words in (
        ("centralized", "gradient", "round", "centralized"),
        ("hierarchical", "iteration.gradient", ITERATION, "hierarchical, every iteration"),
        ("hierarchical", "gradient", "round", "hierarchical, last iterations only"),
    ):
        for scenario in SCENARIOS:
            condition = f"extended-{topology}-{scenario}"
            title = f"Average gradient per layer, {words}, {scenario}"
            figures.append(Figure(f"fig{number}", title, (condition,), _layers(condition, prefix, x)))
            number += 1
    return tuple(figures)


FIGURES = _paper()


def coverage(drawn: Drawn) -> str:
    """Return in words how many repeats, clients and rounds are behind a figure, on which data, and what is left out."""
    facts = drawn.facts
    counts = [count for count in facts["repeats"].values() if count]
    repeats = _span(counts)
    said = [
        f"{repeats} repeat{'' if repeats == '1' else 's'}",
        f"{_span(facts['clients'])} clients",
        f"{_span(facts['rounds'])} rounds",
        ", ".join(facts["datasets"]),
    ]
    if drawn.longest > POINTS:
        said.append(f"of {drawn.longest} points the lowest and the highest of each {drawn.longest * 2 // POINTS} shown")
    if drawn.missing:
        said.append(f"not run: {', '.join(drawn.missing)}")
    return " · ".join(said)


def _span(numbers: Sequence[int]) -> str:
    low, high = int(np.min(numbers)), int(np.max(numbers))
    return str(low) if low == high else f"{low} to {high}"
