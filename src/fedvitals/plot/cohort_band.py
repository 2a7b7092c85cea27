# SPDX-License-Identifier: Apache-2.0
"""Vital signs of all clients over the rounds: the cohort as a band, with suspects, a client or the whole run on top."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedvitals.palette import MODEL, OTHERS
from fedvitals.plot import canvas
from fedvitals.plot.canvas import Figure, drawn
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, check_client, check_sign, opened, suspects
from fedvitals.plot.style import COLOURS, axis_unit, words
from fedvitals.records import AnyName, is_client, node_name
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import cases_of, concerns
from fedvitals.views.cohort import Matrix
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.series import Band, Series, band, series

POINTS = 240  # buckets of rounds; each keeps its extremes
LINES = 6  # on top of the band; more would be unreadable
LEGEND = "min–max, 5–95 %, median client"
FEW = 3  # clients needed for a band and a median
LABEL_WIDTH = 24  # characters of a line beside an axis


@drawn
def cohort(run: Which, sign: str = "loss", *, nodes: Sequence[AnyName] | None = None, store: Target = None) -> Figure:
    """Draw a sign's spread over the clients in each round, with some clients on top.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        sign: The metric.
        nodes: The clients on top; by default those that findings name.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        check_sign(reader, chosen, sign)
        matrix, cases = metric_matrix(reader, chosen, sign), cases_of(reader, chosen)
        clients = sum(is_client(node) for node in reader.history(chosen).nodes())
    if not matrix.nodes:
        return canvas.nothing(f"No client reported its {words(metric_title(sign), 60)}.")
    named = [*map(node_name, nodes)] if nodes is not None else suspects(cases, LINES)
    figure, axes = canvas.panel(2.6)
    canvas.head(axes, words(metric_title(sign), 50), f"{LEGEND}; {told_by(band(sign, matrix, POINTS), clients)}")
    draw_cohort(axes, sign, matrix, named[:LINES])
    canvas.flags(axes, [case for case in cases if case.node is None or case.node in named])
    canvas.round_axis(axes, matrix.rounds)
    return figure


def draw_cohort(axes: Any, sign: str, matrix: Matrix, named: Sequence[str]) -> None:
    """Draw the band and the lines of the named clients, with their names at the ends."""
    cohort_band = band(sign, matrix, POINTS)
    shown = [(node, *matrix[node]) for node in named]
    seen = np.concatenate(
        [canvas.numbers(cohort_band.min), canvas.numbers(cohort_band.max), *(np.array(v, float) for _, _, v in shown)]
    )
    height = Height("log" if _is_wide(seen) else "linear", seen)
    draw_band(axes, cohort_band, height)
    ends: list[End] = []
    for place, (node, rounds, values) in enumerate(shown):
        colour = COLOURS[(place + 1) % len(COLOURS)]  # the first is the model's
        heights = height.of(np.array(values, float))
        if 2 * len(rounds) < len(matrix.rounds):  # reported now and then: the values in between are unknown
            axes.plot(rounds, heights, "o", color=colour, markersize=3.5)
        else:
            canvas.line(axes, rounds, heights.tolist(), colour)
        ends += end_of(words(node, 16), colour, rounds, heights)
    height.dress(axes)
    if height.scale == "linear":
        canvas.value_axis(axes, cohort_band.unit)
    name = f"{words(metric_title(sign), 60)}{axis_unit(cohort_band.unit) if height.scale == 'log' else ''}"
    axes.set_ylabel(textwrap.fill(name, LABEL_WIDTH), labelpad=2)
    label_ends(axes, ends)


def draw_band(axes: Any, cohort_band: Band, height: Height, colour: str = OTHERS, *, clients: int = 0) -> None:
    """Draw minimum to maximum, 5 % to 95 %, and the median; faint points where only one or two clients reported."""
    low, p5, median, p95, high = (
        height.of(canvas.numbers(values))
        for values in (cohort_band.min, cohort_band.p5, cohort_band.median, cohort_band.p95, cohort_band.max)
    )
    few = told_by_few(cohort_band, clients)
    for bottom, top, alpha in ((low, high, 0.12), (p5, p95, 0.22)):
        own = np.where(few, np.nan, bottom)
        axes.fill_between(cohort_band.rounds, own, top, color=colour, alpha=alpha, linewidth=0)
        lone = canvas.alone(own)  # a band of one round has no width
        axes.vlines(np.asarray(cohort_band.rounds)[lone], own[lone], top[lone], colour, alpha=alpha, linewidth=3)
    canvas.line(axes, cohort_band.rounds, np.where(few, np.nan, median).tolist(), colour, linewidth=1.0)
    for ends in (low, high):  # with two clients, both
        axes.plot(
            np.asarray(cohort_band.rounds)[few], ends[few], "o", color=colour, alpha=0.45, markersize=3, mfc="none"
        )
    odd = [r for r, count in zip(cohort_band.rounds, cohort_band.clients, strict=True) if not count]
    canvas.mark_not_finite(axes, odd)


def told_by_few(cohort_band: Band, clients: int = 0) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return where too few clients reported to form a cohort; nowhere if the run has no more clients."""
    counts = np.asarray(cohort_band.clients, np.int64)
    return np.asarray((counts > 0) & (counts < FEW) & (counts.max(initial=clients) >= FEW))


def told_by(cohort_band: Band, clients: int) -> str:
    """Return how many clients reported in a round, as text: «1 to 10 of 20 clients a round»."""
    counts = [count for count in cohort_band.clients if count]
    if not counts:
        return f"none of {clients} clients"
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    return f"{many} of {clients} clients"


def _is_wide(values: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Whether a log axis shows more: nothing negative, and two orders of magnitude above the median."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(positive.size and finite.min() >= 0 and positive.max() > 100 * np.median(positive))


SIGNS = (
    "fit.loss_before", "fit.accuracy_before", "loss", "train.loss_common", "train.loss_rare", "train.loss_short",
    "train.loss_long", "update.norm", "update.cosine_mean", "gradient.norm",
    "scale.gsc", "time.client",
)  # fmt: skip


@drawn
def client(run: Which, node: AnyName, *, store: Target = None) -> Figure:
    """Draw a client's signs as lines over the band of all clients, with the findings about it on the axis.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        node: The client.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    name = node_name(node)
    with opened(run, store) as (reader, chosen):
        check_client(reader, chosen, name)
        known = set(queries.metric_names(reader, chosen))
        matrices = {sign: metric_matrix(reader, chosen, sign) for sign in SIGNS if sign in known}
        cases = [case for case in cases_of(reader, chosen) if concerns(case, name)]
        rounds = reader.history(chosen).rounds()
    shown = {sign: matrix for sign, matrix in matrices.items() if name in matrix.nodes}
    if not shown:
        return canvas.nothing(f"{words(name)} reported none of the usual signs.")
    lines = -(-len(shown) // 2)
    figure, grid = canvas.sheet(lines, 1.7, 2)
    for axes, (sign, matrix) in zip(grid.flat, shown.items(), strict=False):
        draw_cohort(axes, sign, matrix, [name])
        canvas.head(axes, words(metric_title(sign), 50))
        canvas.flags(axes, cases)
        canvas.round_axis(axes, rounds, label=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    return figure


# For each panel: the federation's own sign, and the clients' signs that can be drawn behind it, best first.
PANELS = {
    "accuracy": ("accuracy", "local.accuracy", "fit.accuracy_before"),
    "loss": ("loss", "local.loss", "fit.loss_before"),
}


@drawn
def learning(run: Which, *, store: Target = None) -> Figure:
    """Draw accuracy and loss over the rounds, with the clients' spread behind them and findings on the axis.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        panels = {name: _panel(reader, chosen, name, behind) for name, behind in PANELS.items()}
        cases, rounds = cases_of(reader, chosen), reader.history(chosen).rounds()
        clients = sum(is_client(node) for node in reader.history(chosen).nodes())
    shown = {name: panel for name, panel in panels.items() if panel[0].rounds or panel[1] is not None}
    if not shown:
        return canvas.nothing(
            "Neither accuracy nor loss was measured.", "monitor.log(accuracy=...) does, or data and loss."
        )
    figure, grid = canvas.sheet(len(shown), 1.9, share_x=True)
    for place, (axes, (name, (own, cohort))) in enumerate(zip(grid[:, 0], shown.items(), strict=True)):
        canvas.round_axis(axes, rounds, label=place == len(shown) - 1)
        _draw(axes, name, own, cohort, clients)
        canvas.flags(axes, cases, named=place == 0)
    return figure


def _panel(reader: Reader, run: str, name: str, behind: tuple[str, ...]) -> tuple[Series, Band | None]:
    own = series(reader, run, name, None, POINTS)
    for other in behind:
        matrix = metric_matrix(reader, run, other)
        if matrix.nodes:
            return own, band(other, matrix, POINTS)
    return own, None


def _draw(axes: Any, name: str, own: Series, cohort: Band | None, clients: int) -> None:
    spread = [] if cohort is None else [canvas.numbers(cohort.p5), canvas.numbers(cohort.p95)]
    height = Height("linear", np.concatenate([canvas.numbers(own.values), *spread, np.zeros(1)]))
    ends: list[End] = []
    note = ""
    if cohort is not None:
        draw_band(axes, cohort, height, clients=clients)
        few, middle = told_by_few(cohort, clients), height.of(canvas.numbers(cohort.median))
        scarce = bool(few.size and few.all())  # never enough for a band
        known = np.flatnonzero(np.isfinite(middle))
        whose = "clients" if known.size and few[known[-1]] else "median client"
        ends += end_of(whose, OTHERS, cohort.rounds, middle)
        note = f"{'points' if scarce else 'band'}: {metric_title(cohort.name)}, measured on {told_by(cohort, clients)}"
    if own.rounds:
        heights = height.of(canvas.numbers(own.values))
        canvas.line(axes, own.rounds, heights.tolist(), MODEL, linewidth=1.6)
        canvas.mark_not_finite(axes, own.odd)
        ends += end_of("global model" if own.of == "federation" else own.of, MODEL, own.rounds, heights)
    canvas.head(axes, name, note)
    unit = own.unit or ("" if cohort is None else cohort.unit)
    height.dress(axes)
    canvas.value_axis(axes, unit)
    axes.set_ylabel(f"{name}{'' if unit == 'share' else axis_unit(unit)}", labelpad=2)
    label_ends(axes, ends)
