# SPDX-License-Identifier: Apache-2.0
"""The gradient scale coefficient of one run or several, on a log axis where 0 is a level of its own.

The paper (Bogacka et al. 2024) leaves two readings open; both are stored, and every picture says which it shows.
"""

from __future__ import annotations

import numpy as np

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.cases import Case
from fedvitals.errors import ConfigError, unknown
from fedvitals.plot.canvas import Figure, drawn, flags, head, line, nothing, numbers, panel, round_axis
from fedvitals.plot.cohort_band import LEGEND, POINTS, draw_band
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, words
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.series import Band, band

READINGS = {
    "scale.gsc": "(1/√n)·‖J‖·‖logits‖/‖input‖",
    "scale.sensitivity": "(1/√n)·‖J‖·‖input‖/‖logits‖",
    "nonlinearity.nlc": "√(E tr(J·Cov·Jᵀ) / tr Cov)",
}


@drawn
def gsc(*runs: Which, reading: str = "scale.gsc", store: Target = None) -> Figure:
    """Draw the median client's gradient scale and its spread over the clients; several runs share one axis."""
    if not runs:
        raise ConfigError("gsc() needs a run, or several: fv.plot.gsc('baseline', 'exploding').")
    if reading not in READINGS:
        raise ConfigError(unknown("reading of the gradient scale", reading, READINGS))
    bands: list[tuple[str, Band]] = []
    cases: list[Case] = []
    for run in runs:
        with opened(run, store) as (reader, chosen):
            matrix = metric_matrix(reader, chosen, reading)
            if matrix.nodes:
                bands.append((queries.get_run(reader, chosen).name, band(reading, matrix, POINTS)))
                cases = cases_of(reader, chosen) if len(runs) == 1 else []
    if not bands:
        return nothing(f"{reading} was not measured.", f"It needs {CATALOG[reading].needs}.")
    return _draw(bands, reading, cases)


def _draw(bands: list[tuple[str, Band]], reading: str, cases: list[Case]) -> Figure:
    figure, axes = panel(2.6)
    head(axes, f"{reading} = {READINGS[reading]}", LEGEND if len(bands) == 1 else "median client of each run; 5–95 %")
    height = Height("log", np.concatenate([numbers(v) for _, run_band in bands for v in (run_band.min, run_band.max)]))
    ends: list[End] = []
    for place, (name, run_band) in enumerate(bands):
        colour = COLOURS[place % len(COLOURS)]
        middle = height.of(numbers(run_band.median))
        if len(bands) == 1:
            draw_band(axes, run_band, height, colour)
        else:
            axes.fill_between(
                run_band.rounds, height.of(numbers(run_band.p5)), height.of(numbers(run_band.p95)),
                color=colour, alpha=0.15, linewidth=0,
            )  # fmt: skip
            dashes = "solid" if place < len(COLOURS) else "dashed"
            line(axes, run_band.rounds, middle.tolist(), colour, linestyle=dashes)
        ends += end_of(words(name, 18), colour, run_band.rounds, middle)
    height.dress(axes)
    axes.set_ylabel(reading, labelpad=2)
    if len(bands) > 1:
        label_ends(axes, ends)
    flags(axes, cases)
    round_axis(axes, [number for _, run_band in bands for number in run_band.rounds])
    return figure
