# SPDX-License-Identifier: Apache-2.0
"""The gradient through the layers of the model, and the gradient scale coefficient of one run or several.

The paper (Bogacka et al. 2024) does not say whether its «average gradient per layer» is signed: both are shown. It
allows two readings of the gradient scale; both are stored, and every picture says which it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.cases import Case
from fedvitals.errors import ConfigError, unknown
from fedvitals.plot import canvas
from fedvitals.plot.canvas import Figure, drawn
from fedvitals.plot.cohort_band import LEGEND, POINTS, draw_band
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, words
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from fedvitals.views.layers import Average, Averages, DepthProfile, layers_page
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.series import Band, Numbers, band

NAMED = 24  # layers named below the axis
MOST_LINES = 8


@drawn
def gradient_flow(run: Which, *, store: Target = None) -> Figure:
    """Draw the size of the gradient from the first layer to the last, one line a round, and the paper's averages.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        page = layers_page(reader, chosen, family="gradient", statistic="rms")
    if not page.profile.lines:
        return canvas.nothing("No gradient was measured layer by layer.", *page.missing[:1])
    figure = canvas.wide_sheet((2.5, 2.0))
    wide, left, right = figure.axes
    _depth(wide, page.profile)
    what = "weights only" if page.weights_only else "all layers"
    canvas.head(wide, "gradient through the depth, root mean square", f"light: early rounds, dark: late; {what}")
    _averages(left, page.averages, lambda average: average.mean, "linear")
    canvas.head(left, "average gradient, signed mean")
    _averages(right, page.averages, lambda average: average.magnitude, "log")
    canvas.head(right, "average gradient, mean magnitude")
    return figure


def _depth(axes: Any, profile: DepthProfile) -> None:
    from matplotlib import colormaps  # noqa: PLC0415 - an extra
    from matplotlib.colors import to_hex  # noqa: PLC0415

    def shades(share: float) -> str:
        return str(to_hex(colormaps["cividis_r"](share)))

    height = Height("log", np.concatenate([canvas.numbers(curve.values) for curve in profile.lines]))
    across = range(len(profile.layers))
    last = max(1, len(profile.lines) - 1)
    for place, curve in enumerate(profile.lines):
        canvas.line(
            axes,
            across,
            height.of(canvas.numbers(curve.values)).tolist(),
            shades(0.1 + 0.9 * place / last),
            linewidth=1.1,
        )
    height.dress(axes)
    ends = []
    for curve, share in ((profile.lines[0], 0.1), (profile.lines[-1], 1.0)):
        heights = height.of(canvas.numbers(curve.values))
        if np.isfinite(heights[-1]):
            ends.append((f"round {curve.round}", shades(share), float(across[-1]), float(heights[-1])))
    label_ends(axes, ends if len(profile.lines) > 1 else ends[:1])
    step = -(-len(profile.layers) // NAMED)
    names = [words(name, 16) for name in profile.layers[::step]]
    many = len(names) > 6
    axes.set_xticks(list(across[::step]), names, usetex=False)
    axes.tick_params(axis="x", labelsize=canvas.SMALL, labelrotation=30 if many else 0)


def _averages(axes: Any, averages: Averages | None, of: Callable[[Average], Numbers], scale: str) -> None:
    if averages is None:
        canvas.empty(axes, "not measured")
        return
    shown = averages.layers[:MOST_LINES]
    height = Height(scale, np.concatenate([canvas.numbers(of(average)) for average in shown]))
    ends: list[End] = []
    for place, average in enumerate(shown):
        colour = COLOURS[place % len(COLOURS)]
        heights = height.of(canvas.numbers(of(average)))
        canvas.line(
            axes, averages.rounds, heights.tolist(), colour, linestyle="solid" if place < len(COLOURS) else "dashed"
        )
        ends += end_of(words(average.layer, 14), colour, averages.rounds, heights)
    height.dress(axes)
    if scale == "linear":
        canvas.value_axis(axes, "1")
    label_ends(axes, ends)
    canvas.round_axis(axes, averages.rounds)


READINGS = {
    "scale.gsc": "(1/√n)·‖J‖·‖logits‖/‖input‖",
    "scale.sensitivity": "(1/√n)·‖J‖·‖input‖/‖logits‖",
    "nonlinearity.nlc": "√(E tr(J·Cov·Jᵀ) / tr Cov)",
}


@drawn
def gsc(*runs: Which, reading: str = "scale.gsc", store: Target = None) -> Figure:
    """Draw the median client's gradient scale and its spread over the clients; several runs share one axis.

    Args:
        runs: The runs, one line each.
        reading: «scale.gsc», or another reading of the gradient scale.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
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
        return canvas.nothing(f"{reading} was not measured.", f"It needs {CATALOG[reading].needs}.")
    return _draw(bands, reading, cases)


def _draw(bands: list[tuple[str, Band]], reading: str, cases: list[Case]) -> Figure:
    figure, axes = canvas.panel(2.6)
    canvas.head(
        axes,
        f"{metric_title(reading)} = {READINGS[reading]}",
        LEGEND if len(bands) == 1 else "median client of each run; 5–95 %",
    )
    height = Height(
        "log", np.concatenate([canvas.numbers(v) for _, run_band in bands for v in (run_band.min, run_band.max)])
    )
    ends: list[End] = []
    for place, (name, run_band) in enumerate(bands):
        colour = COLOURS[place % len(COLOURS)]
        middle = height.of(canvas.numbers(run_band.median))
        if len(bands) == 1:
            draw_band(axes, run_band, height, colour)
        else:
            axes.fill_between(
                run_band.rounds, height.of(canvas.numbers(run_band.p5)), height.of(canvas.numbers(run_band.p95)),
                color=colour, alpha=0.15, linewidth=0,
            )  # fmt: skip
            dashes = "solid" if place < len(COLOURS) else "dashed"
            canvas.line(axes, run_band.rounds, middle.tolist(), colour, linestyle=dashes)
        ends += end_of(words(name, 18), colour, run_band.rounds, middle)
    height.dress(axes)
    axes.set_ylabel(metric_title(reading), labelpad=2)
    if len(bands) > 1:
        label_ends(axes, ends)
    canvas.flags(axes, cases)
    canvas.round_axis(axes, [number for _, run_band in bands for number in run_band.rounds])
    return figure
