# SPDX-License-Identifier: Apache-2.0
"""The federation's accuracy and loss, over the band of its clients' own."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedvitals.plot.canvas import Figure, drawn, flags, head, line, nothing, numbers, round_axis, sheet, value_axis
from fedvitals.plot.cohort_band import POINTS, draw_band, told_by, told_by_few
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import BLUE, VERMILLION, axis_unit
from fedvitals.records import is_client
from fedvitals.store import Target
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import cases_of
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.series import Band, Series, band, series

# Of each panel: the federation's own sign, and what clients may tell that can stand behind it, best first.
PANELS = {
    "accuracy": ("accuracy", "local.accuracy", "fit.accuracy_before"),
    "loss": ("loss", "local.loss", "fit.loss_before"),
}


@drawn
def learning(run: Which, *, store: Target = None) -> Figure:
    """Draw accuracy and loss over the rounds, with the clients' spread behind them and findings on the axis."""
    with opened(run, store) as (reader, chosen):
        panels = {name: _panel(reader, chosen, name, behind) for name, behind in PANELS.items()}
        cases, rounds = cases_of(reader, chosen), reader.history(chosen).rounds()
        clients = sum(is_client(node) for node in reader.history(chosen).nodes())
    shown = {name: panel for name, panel in panels.items() if panel[0].rounds or panel[1] is not None}
    if not shown:
        return nothing("Neither accuracy nor loss was told.", "monitor.log(accuracy=...) does, or data and loss.")
    figure, grid = sheet(len(shown), 1.9, share_x=True)
    for place, (axes, (name, (own, cohort))) in enumerate(zip(grid[:, 0], shown.items(), strict=True)):
        round_axis(axes, rounds, label=place == len(shown) - 1)
        _draw(axes, name, own, cohort, clients)
        flags(axes, cases, named=place == 0)
    return figure


def _panel(reader: Reader, run: str, name: str, behind: tuple[str, ...]) -> tuple[Series, Band | None]:
    own = series(reader, run, name, None, POINTS)
    for other in behind:
        matrix = metric_matrix(reader, run, other)
        if matrix.nodes:
            return own, band(other, matrix, POINTS)
    return own, None


def _draw(axes: Any, name: str, own: Series, cohort: Band | None, clients: int) -> None:
    spread = [] if cohort is None else [numbers(cohort.p5), numbers(cohort.p95)]
    height = Height("linear", np.concatenate([numbers(own.values), *spread, np.zeros(1)]))
    ends: list[End] = []
    note = ""
    if cohort is not None:
        draw_band(axes, cohort, height, BLUE, clients=clients)
        few, middle = told_by_few(cohort, clients), height.of(numbers(cohort.median))
        alone = bool(few.size and few.all())  # never enough of them for a band
        known = np.flatnonzero(np.isfinite(middle))
        whose = "clients" if known.size and few[known[-1]] else "median client"
        ends += end_of(whose, BLUE, cohort.rounds, middle)
        note = f"{'points' if alone else 'band'}: {cohort.name}, told by {told_by(cohort, clients)}"
    if own.rounds:
        heights = height.of(numbers(own.values))
        line(axes, own.rounds, heights.tolist(), VERMILLION, linewidth=1.6)
        ends += end_of(own.of, VERMILLION, own.rounds, heights)
    head(axes, name, note)
    unit = own.unit or ("" if cohort is None else cohort.unit)
    height.dress(axes)
    value_axis(axes, unit)
    axes.set_ylabel(f"{name}{'' if unit == 'share' else axis_unit(unit)}", labelpad=2)
    label_ends(axes, ends)
