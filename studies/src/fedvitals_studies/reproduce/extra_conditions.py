# SPDX-License-Identifier: Apache-2.0
"""What the paper names as open or does not specify: its figures, and tables of accuracy, bytes, effects and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals.report.markup import Table
from fedvitals_studies.reproduce import yardsticks
from fedvitals_studies.reproduce.claims import Choice
from fedvitals_studies.reproduce.conditions import BEYOND, BY_NAME, IN_ALL_SCENARIOS, MODELS, SCENARIOS, TOPOLOGIES
from fedvitals_studies.reproduce.figures import (
    GSC,
    LAYER_COLOURS,
    SCENARIO_COLOURS,
    TOPOLOGY_COLOURS,
    Figure,
    lines,
)
from fedvitals_studies.reproduce.plot import Line, Panel
from fedvitals_studies.reproduce.results import Results

PLAIN = "as in the paper"
WORDS = {
    "alpha-1.0": "Dirichlet α 1.0",
    "alpha-0.3": "Dirichlet α 0.3",
    "alpha-0.1": "Dirichlet α 0.1",
    "drop-out": "30 % drop-out",
    "fast-rate": "learning rate × 10",
    "slow-rate": "learning rate ÷ 10",
    "by-track": "dealt by track",
}


def _condition(name: str, topology: str) -> str:
    return f"initial-{topology}-clipped" if name == PLAIN else f"beyond-{name}-{topology}"


ROWS = ((PLAIN, "dealt by image, equally"), *((name, WORDS[name]) for name, _ in BEYOND))


def _settings(results: Results) -> list[Panel]:
    return [
        Panel(
            words,
            lines(
                results,
                [
                    (_condition(name, topology), "server.accuracy", None, topology, colour, False)
                    for topology, colour in TOPOLOGY_COLOURS.items()
                ],
            ),
            "server accuracy",
            scale="share",
        )
        for name, words in ROWS
    ]


def _batches(results: Results) -> list[Panel]:
    """Return panels with the last batch's gradient (solid) and that of the client's whole set (dashed)."""
    panels = []
    for scenario in SCENARIOS:
        for reading, words, scale in (
            ("mean", "signed mean", "linear"),
            ("magnitude", "mean magnitude", "log"),
        ):
            wanted = [
                (f"extended-centralized-{scenario}", f"{prefix}.{reading}", layer, f"{layer}, {source}", colour, dashed)
                for layer, colour in LAYER_COLOURS.items()
                for prefix, source, dashed in (("gradient", "batch", False), ("gradient.full", "whole", True))
            ]
            panels.append(Panel(f"{scenario}, {words}", lines(results, wanted), words, scale=scale))
    return panels


def _nonlinearity(results: Results) -> list[Panel]:
    shown = (("nonlinearity.nlc", "nonlinearity coefficient (NLC)"), ("scale.gsc", GSC))
    return [_scenarios(results, "extended-centralized-{}", name, title) for name, title in shown]


def _models(results: Results) -> list[Panel]:
    found = [_scenarios(results, "extended-centralized-{}", "scale.gsc", "GSC of the paper's CNN")]
    found += [_scenarios(results, f"beyond-{model}-{{}}", "scale.gsc", f"GSC of the {model}") for model, _ in MODELS]
    return found


def _whole_set(results: Results) -> list[Panel]:
    """Return panels of the repeat measured on the whole set: a few images of each client (solid), all (dashed)."""
    panels = []
    for topology in ("centralized", "hierarchical"):
        drawn = []
        for scenario, colour in SCENARIO_COLOURS.items():
            name = f"extended-{topology}-{scenario}"
            for run in [run for run in results.of(name) if "scale.gsc_whole" in run["series"]][:1]:
                pair = (("scale.gsc", "few", False), ("scale.gsc_whole", "all", True))
                drawn += [
                    Line(f"{scenario}, {words}", results.array(name, each, None, run["repeat"])[None], colour, dashed)
                    for each, words, dashed in pair
                ]
        panels.append(Panel(f"GSC, {topology}", tuple(drawn), "mean over the cohort", scale="log"))
    return panels


def _scenarios(results: Results, pattern: str, name: str, title: str) -> Panel:
    wanted = [(pattern.format(s), name, None, s, colour, False) for s, colour in SCENARIO_COLOURS.items()]
    return Panel(title, lines(results, wanted), "mean over the cohort", scale="log")


_CENTRALIZED = tuple(f"extended-centralized-{scenario}" for scenario in SCENARIOS)
BEYOND_FIGURES = (
    Figure(
        "beyond1",
        "Other data, lost clients, wrong learning rates",
        tuple(_condition(name, topology) for name, _ in ROWS for topology in TOPOLOGIES),
        _settings,
        "Which topology stands what: label skew, drop-out, wrong learning rates, and dealing by track.",
    ),
    Figure(
        "beyond2",
        "Gradients of the last batch and of the whole set",
        _CENTRALIZED,
        _batches,
        "The paper measures on the client's whole set. Does the last batch, which costs nothing, say the same?",
    ),
    Figure(
        "beyond3",
        "NLC beside GSC, centralized",
        _CENTRALIZED,
        _nonlinearity,
        "The paper names the nonlinearity coefficient as open. A linear map has 1; a gap: it cannot be had.",
    ),
    Figure(
        "beyond4",
        "GSC of other networks, centralized",
        (*_CENTRALIZED, *(f"beyond-{model}-{scenario}" for model, _ in MODELS for scenario in SCENARIOS)),
        _models,
        "Does the separation of the three scenarios hold for other networks? (Fewer clients and rounds where costly.)",
    ),
    Figure(
        "beyond5",
        "GSC of a few images and of the client's whole set",
        tuple(
            f"extended-{topology}-{scenario}" for topology in ("centralized", "hierarchical") for scenario in SCENARIOS
        ),
        _whole_set,
        "The paper measures on the whole set, which costs many times the training. One repeat shows what is lost.",
    ),
)


def over_repeats(numbers: Sequence[float], digits: int = 3) -> str:
    """Return a mean, and the range if there are several: `0.912 (0.905 to 0.918)`."""
    finite = [n for n in numbers if np.isfinite(n)]
    if not finite:
        return "–" if not len(numbers) else ", ".join(sorted({number_words(n, digits) for n in numbers}))
    mean = number_words(float(np.mean(finite)), digits)
    if len(finite) == 1 or min(finite) == max(finite):
        return mean
    return f"{mean} ({number_words(min(finite), digits)} to {number_words(max(finite), digits)})"


def number_words(number: float, digits: int = 3) -> str:
    if np.isnan(number):
        return "none"
    if np.isinf(number):
        return "∞" if number > 0 else "−∞"
    text = f"{number:.{digits}g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def _per_repeat(results: Results, condition: str, name: str, measure: str) -> list[float]:
    if not results.has(condition, name):
        return []
    function = yardsticks.YARDSTICKS[measure]
    return [function(results.array(condition, name, None, repeat)) for repeat in results.repeats(condition, name)]


def _percent(shares: Sequence[float]) -> str:
    return over_repeats([100 * share for share in shares]) + (" %" if len(shares) else "")


def _bytes(results: Results, condition: str, name: str) -> str:
    if not results.has(condition, name):
        return "–"
    return bytes_words(float(np.mean(np.nansum(results.stack(condition, name), axis=1))))


def setting_tables(results: Results) -> list[Table]:
    """Return accuracy, server bytes and edge bytes of every setting in every topology."""
    head = ("setting", *TOPOLOGIES)

    def rows(cell_of: object) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (words, *(cell_of(_condition(name, topology)) for topology in TOPOLOGIES))  # type: ignore[operator]
            for name, words in ROWS
        )

    def accuracy(condition: str) -> str:
        return _percent(_per_repeat(results, condition, "server.accuracy", "final"))

    def bytes_of(name: str) -> object:
        return lambda condition: _bytes(results, condition, name)

    return [
        Table("Server accuracy, mean of the last three rounds", head, rows(accuracy), "– : not run"),
        Table("Bytes to and from the server, whole run", head, rows(bytes_of("bytes.server"))),
        Table("Bytes to and from the edges, whole run", head, rows(bytes_of("bytes.edge"))),
    ]


def sensitivity_table(results: Results, choices: Sequence[Choice]) -> Table:
    """Return each choice that the paper leaves open, with what changes under an alternative, including conclusions.

    The reference is cut to the same number of rounds.
    """
    rows = []
    for choice in choices:
        name = choice.condition
        if name is None or name not in results or "initial-centralized-clipped" not in results:
            effect = ("–", "–", "–", "stated above" if name is None else "not run")
        else:
            effect = _effect(results, name)
        rows.append((choice.what, choice.ours, choice.other, *effect))
    return Table(
        "Where the paper is silent: our choice, and what another one changes (centralized, clipped)",
        ("what", "ours", "other", "server accuracy, ours → other", "largest fall, ours → other",
         "exploding over baseline → vanishing", "conclusion"),
        tuple(rows),
        "Both cut to the same number of rounds. The sixth column: orders of magnitude of GSC between exploding and the "
        "baseline with the other choice, and the share of rounds in which vanishing is 0.",
    )  # fmt: skip


def _effect(results: Results, name: str) -> tuple[str, str, str, str]:
    rounds = results.of(name)[0]["rounds"]
    ours = results.stack("initial-centralized-clipped", "server.accuracy")[:, :rounds]
    other = results.stack(name, "server.accuracy")
    finals = [[yardsticks.final(run) for run in runs] for runs in (ours, other)]
    falls = [[yardsticks.largest_fall(run) for run in runs] for runs in (ours, other)]
    changes = []
    means = [float(np.mean(each)) for each in finals]
    if abs(means[1] - means[0]) >= 0.05:
        changes.append(
            f"accuracy {'higher' if means[1] > means[0] else 'lower'} by {100 * abs(means[1] - means[0]):.0f} points"
        )
    if (max(falls[0]) <= 0.05) != (max(falls[1]) <= 0.05):
        changes.append("smooth no more" if max(falls[0]) <= 0.05 else "smooth now")
    parted = "–"
    if name.removeprefix("sensitivity-") in IN_ALL_SCENARIOS and all(f"{name}-{s}" in results for s in SCENARIOS[1:]):
        parted, holds = _parted(results, name)
        changes += [] if holds else ["GSC does not part the scenarios"]
    return (
        f"{_percent(finals[0])} → {_percent(finals[1])}",
        f"{_percent(falls[0])} → {_percent(falls[1])}",
        parted,
        ", ".join(changes) or "unchanged",
    )


def _parted(results: Results, name: str) -> tuple[str, bool]:
    """Return whether GSC still distinguishes the scenarios with another choice, in words and as a fact."""
    exploding, vanishing = f"{name}-exploding", f"{name}-vanishing"
    rounds = results.of(exploding)[0]["rounds"]
    gaps, zeros = [], []
    shared = set(results.repeats(name)) & set(results.repeats(exploding)) & set(results.repeats(vanishing))
    for repeat in sorted(shared):
        baseline = results.array(name, "scale.gsc", None, repeat)[:rounds]
        gaps.append(yardsticks.gap(results.array(exploding, "scale.gsc", None, repeat), baseline))
        zeros.append(yardsticks.share_zero(results.array(vanishing, "scale.gsc", None, repeat)))
    if not gaps:
        return "–", True
    return f"{over_repeats(gaps)} → {_percent(zeros)}", min(gaps) > 0 and min(zeros) == 1


def model_table(results: Results) -> Table:
    """Return whether GSC distinguishes the three scenarios in other networks."""
    rows = []
    for model, words, names in _networks():
        if not all(results.has(name, "scale.gsc") for name in names):
            rows.append((f"{model}, {words}", "–", "–", "–", "not run"))
            continue
        gaps, below, zeros = _gaps_by_round(results, *names)
        word = "all three apart" if min(gaps) > 0 and min(below) > 0 else "not apart"
        size = BY_NAME[names[0]]
        rows.append(
            (f"{model}, {words}, {size.clients} clients, {size.rounds} rounds", over_repeats(gaps), over_repeats(below),
             _percent(zeros), word)
        )  # fmt: skip
    head = ("network", "exploding over baseline", "baseline over vanishing", "vanishing at 0", "GSC tells")
    return Table(
        "Does GSC part the scenarios in other networks?", head, tuple(rows),
        "Orders of magnitude between the scenarios in the same round of the same repeat, the smallest over the rounds; "
        "range of the repeats. «Wrong gain» multiplies all first weights; the paper's scenarios are ReLU with weights "
        "from U(8, 10) and tanh with U(4, 7), here in every hidden layer.",
    )  # fmt: skip


def _networks() -> list[tuple[str, str, list[str]]]:
    """Return each network with the kind of its scenarios, and its conditions in the scenarios' order."""
    networks = [("paper-cnn", "the paper's scenarios", [f"extended-centralized-{scenario}" for scenario in SCENARIOS])]
    for model, _ in MODELS:
        baseline = f"beyond-{model}-baseline"
        networks.append((model, "wrong gain", [f"beyond-{model}-{scenario}" for scenario in SCENARIOS]))
        own = [baseline, *(f"beyond-{model}-paper-{scenario}" for scenario in SCENARIOS[1:])]
        networks.append((model, "the paper's scenarios", own))
    return networks


def _gaps_by_round(
    results: Results, baseline: str, exploding: str, vanishing: str
) -> tuple[list[float], list[float], list[float]]:
    """Return for each common repeat: exploding over baseline, baseline over vanishing, share of vanishing at 0."""
    shared = set(results.repeats(baseline)) & set(results.repeats(exploding)) & set(results.repeats(vanishing))
    gaps, below, zeros = [], [], []
    for repeat in sorted(shared):
        usual, large, none = (results.array(n, "scale.gsc", None, repeat) for n in (baseline, exploding, vanishing))
        gaps.append(yardsticks.gap_by_round(large, usual))
        below.append(yardsticks.gap_by_round(usual, none))
        zeros.append(yardsticks.share_zero(none))
    return gaps, below, zeros


def cost_table(costs: Mapping[str, Any] | None) -> Table:
    """Return what each metric costs a client, which the paper only discusses."""
    head = ("metric", "time a client-round", "of its 20 iterations", "bytes sent")
    if costs is None:
        return Table("What each metric costs", head, (), "Not measured.")
    training = costs["training"]
    rows = [
        (
            name,
            f"{1000 * cost['seconds']:.3g} ms",
            f"{100 * cost['seconds'] / training:.3g} %",
            bytes_words(cost["bytes"]),
        )
        for name, cost in sorted(costs["costs"].items(), key=lambda entry: -float(entry[1]["seconds"]))
    ]
    note = f"On one core; the 20 iterations themselves take {1000 * training:.3g} ms (engine reuse). Dearest first."
    return Table("What each metric costs", head, tuple(rows), note)


def bytes_words(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"


def seconds_words(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"


def run_table(results: Results) -> Table:
    """Return every condition that was run."""
    rows = []
    for name in results.conditions:
        runs = results.of(name)
        first = runs[0]
        took = [run["seconds"] for run in runs]
        rows.append(
            (name, str(len(runs)), str(first["clients"]), str(first["rounds"]),
             _percent(_per_repeat(results, name, "server.accuracy", "final")),
             _percent(_per_repeat(results, name, "aggregated.accuracy", "final")),
             seconds_words(float(np.mean(took))), f"{first['engine']}, {first['device']}",
             f"beginning of {first['beginning_of']}" if "beginning_of" in first else "")
        )  # fmt: skip
    head = ("condition", "repeats", "clients", "rounds", "server accuracy", "aggregated accuracy", "time", "engine", "")
    return Table("All runs", head, tuple(rows))
