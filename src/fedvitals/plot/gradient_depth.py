# SPDX-License-Identifier: Apache-2.0
"""The gradient through the layers of the model, by round, and each layer's average over the rounds.

The paper (Bogacka et al. 2024) does not say whether its «average gradient per layer» is signed: both are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedvitals.plot.canvas import (
    SMALL,
    Figure,
    drawn,
    empty,
    head,
    line,
    nothing,
    numbers,
    round_axis,
    value_axis,
    wide_sheet,
)
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, words
from fedvitals.store import Target
from fedvitals.views.layers import Average, Averages, DepthProfile, layers_page
from fedvitals.views.series import Numbers

NAMED = 24  # layers whose names stand under the axis
MOST_LINES = 8


@drawn
def gradient_flow(run: Which, *, store: Target = None) -> Figure:
    """Draw the size of the gradient from the first layer to the last, one line a round, and the paper's averages."""
    with opened(run, store) as (reader, chosen):
        page = layers_page(reader, chosen, family="gradient", statistic="rms")
    if not page.profile.lines:
        return nothing("No gradient was measured layer by layer.", *page.missing[:1])
    figure = wide_sheet((2.5, 2.0))
    wide, left, right = figure.axes
    _depth(wide, page.profile)
    what = "weights only" if page.weights_only else "all layers"
    head(wide, "gradient through the depth, root mean square", f"light: early rounds, dark: late; {what}")
    _averages(left, page.averages, lambda average: average.mean, "linear")
    head(left, "average gradient, signed mean")
    _averages(right, page.averages, lambda average: average.magnitude, "log")
    head(right, "average gradient, mean magnitude")
    return figure


def _depth(axes: Any, profile: DepthProfile) -> None:
    from matplotlib import colormaps  # noqa: PLC0415 - an extra
    from matplotlib.colors import to_hex  # noqa: PLC0415

    def shades(share: float) -> str:
        return str(to_hex(colormaps["cividis_r"](share)))

    height = Height("log", np.concatenate([numbers(curve.values) for curve in profile.lines]))
    across = range(len(profile.layers))
    last = max(1, len(profile.lines) - 1)
    for place, curve in enumerate(profile.lines):
        line(axes, across, height.of(numbers(curve.values)).tolist(), shades(0.1 + 0.9 * place / last), linewidth=1.1)
    height.dress(axes)
    ends = []
    for curve, share in ((profile.lines[0], 0.1), (profile.lines[-1], 1.0)):
        heights = height.of(numbers(curve.values))
        if np.isfinite(heights[-1]):
            ends.append((f"round {curve.round}", shades(share), float(across[-1]), float(heights[-1])))
    label_ends(axes, ends if len(profile.lines) > 1 else ends[:1])
    step = -(-len(profile.layers) // NAMED)
    names = [words(name, 16) for name in profile.layers[::step]]
    many = len(names) > 6
    axes.set_xticks(list(across[::step]), names, usetex=False)
    axes.tick_params(axis="x", labelsize=SMALL, labelrotation=30 if many else 0)


def _averages(axes: Any, averages: Averages | None, of: Callable[[Average], Numbers], scale: str) -> None:
    if averages is None:
        empty(axes, "not measured")
        return
    shown = averages.layers[:MOST_LINES]
    height = Height(scale, np.concatenate([numbers(of(average)) for average in shown]))
    ends: list[End] = []
    for place, average in enumerate(shown):
        colour = COLOURS[place % len(COLOURS)]
        heights = height.of(numbers(of(average)))
        line(axes, averages.rounds, heights.tolist(), colour, linestyle="solid" if place < len(COLOURS) else "dashed")
        ends += end_of(words(average.layer, 14), colour, averages.rounds, heights)
    height.dress(axes)
    if scale == "linear":
        value_axis(axes, "1")
    label_ends(axes, ends)
    round_axis(axes, averages.rounds)
