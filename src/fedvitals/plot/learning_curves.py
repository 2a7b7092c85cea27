# SPDX-License-Identifier: Apache-2.0
"""How well the federation learns: its accuracy and its loss, over the band of its clients' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.plot.canvas import drawn, flags, head, line, nothing, numbers, round_axis, sheet, value_axis
from fedvitals.plot.cohort_band import POINTS, draw_band
from fedvitals.plot.scale import Height
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import BLUE, VERMILLION, axis_unit
from fedvitals.store import Target
from fedvitals.store.reader import Reader
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.series import Band, Series, band, median_series, series
from fedvitals.views.troubles import cases_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of each panel: the federation's own sign, and what clients may tell that can stand behind it, best first.
PANELS = {
    "accuracy": ("accuracy", "local.accuracy", "fit.accuracy_before"),
    "loss": ("loss", "local.loss", "fit.loss_before"),
}


@drawn
def learning(run: Which, *, store: Target = None) -> Figure:
    """Accuracy and loss over the rounds, with the clients' spread behind them and findings on the axis."""
    with opened(run, store) as (reader, chosen):
        found = {name: _panel(reader, chosen, name, behind) for name, behind in PANELS.items()}
        cases, rounds = cases_of(reader, chosen), reader.history(chosen).rounds()
    shown = {name: panel for name, panel in found.items() if panel[0].rounds or panel[1] is not None}
    if not shown:
        return nothing("Neither accuracy nor loss was told.", "monitor.log(accuracy=...) does, or data and loss.")
    figure, grid = sheet(len(shown), 1.9, share_x=True)
    for place, (axes, (name, (own, cohort))) in enumerate(zip(grid[:, 0], shown.items(), strict=True)):
        _draw(axes, name, own, cohort)
        flags(axes, cases, named=place == 0)
        round_axis(axes, rounds, label=place == len(shown) - 1)
    return figure


def _panel(reader: Reader, run: str, name: str, behind: tuple[str, ...]) -> tuple[Series, Band | None]:
    own = series(reader, run, name, None, POINTS)
    for other in behind:
        matrix = metric_matrix(reader, run, other)
        if matrix.nodes:
            if not own.rounds and other == name:
                own = median_series(name, matrix, POINTS)
            return own, band(other, matrix, POINTS)
    return own, None


def _draw(axes: Any, name: str, own: Series, cohort: Band | None) -> None:
    spread = [] if cohort is None else [numbers(cohort.p5), numbers(cohort.p95)]
    height = Height("linear", np.concatenate([numbers(own.values), *spread, np.zeros(1)]))
    notes = []
    if cohort is not None:
        draw_band(axes, cohort, height, BLUE, middle=bool(own.rounds) is False or cohort.name != name)
        notes.append(f"band: clients' {cohort.name}, min–max and 5–95 %")
    if own.rounds:
        line(axes, own.rounds, height.of(numbers(own.values)).tolist(), VERMILLION, linewidth=1.6)
        notes.insert(0, f"line: {own.of}")
    head(axes, name, "; ".join(notes))
    unit = own.unit or ("" if cohort is None else cohort.unit)
    height.dress(axes)
    value_axis(axes, unit)
    axes.set_ylabel(f"{name}{'' if unit == 'share' else axis_unit(unit)}", labelpad=2)
