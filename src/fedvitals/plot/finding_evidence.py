# SPDX-License-Identifier: Apache-2.0
"""The numbers behind a finding: its suspects over their peers, the limit where one is known, and the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.cases import Case
from fedvitals.plot.canvas import SMALL, Figure, drawn, head, line, nothing, numbers, round_axis, sheet, value_axis
from fedvitals.plot.cohort_band import draw_band
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, HAIRLINE, SEVERITY, axis_unit, words
from fedvitals.store import Target
from fedvitals.views.cases import case_of, cases_of
from fedvitals.views.evidence import Evidence, Plot, evidence_of

POINTS = 240


@drawn
def finding(run: Which, key: str | Case | None = None, *, store: Target = None) -> Figure:
    """Draw the evidence of the worst case, or of the case with this key (as in the dashboard's addresses).

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        key: The case, by the key that the dashboard's addresses have; by default the worst.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        if key is None:
            found_cases = cases_of(reader, chosen)
            if not found_cases:
                return nothing("Nothing was found in this run.", "`fedvitals check RUN` lets the detectors look again.")
            key = found_cases[0]
        case = case_of(reader, chosen, key) if isinstance(key, str) else key
        evidence = evidence_of(reader, chosen, case, POINTS)
        rounds = reader.history(chosen).rounds()
    return draw_evidence(evidence, case, rounds)


@drawn
def draw_evidence(evidence: Evidence, case: Case, rounds: Sequence[int]) -> Figure:
    if not evidence.plots:
        return nothing(f"{case.issue}: nothing that was kept shows it over the rounds.", "Its own numbers tell.")
    figure, grid = sheet(len(evidence.plots), 1.5, share_x=True)
    for place, (axes, plot) in enumerate(zip(grid[:, 0], evidence.plots, strict=True)):
        _draw(axes, plot)
        _seen(axes, evidence, case)
        head(axes, words(plot.title, 70), words(plot.why, 50))
        round_axis(axes, rounds, label=place == len(evidence.plots) - 1)
    return figure


def _draw(axes: Any, plot: Plot) -> None:
    spread = [] if plot.band is None else [numbers(plot.band.min), numbers(plot.band.max)]
    edges = [numbers(values) for curve in plot.lines for values in (curve.low, curve.high)]
    limit = [] if plot.threshold is None else [np.array([plot.threshold.value])]
    height = Height("linear" if plot.scale == "linear" else "log", np.concatenate([*spread, *edges, *limit]))
    if plot.band is not None:
        draw_band(axes, plot.band, height)
    ends: list[End] = []
    for place, curve in enumerate(plot.lines):
        colour = COLOURS[(place + 1) % len(COLOURS)]
        heights = height.of(numbers(curve.values))
        line(axes, curve.rounds, heights.tolist(), colour)
        ends += end_of(words(curve.of, 18), colour, curve.rounds, heights)
    height.dress(axes)
    if plot.threshold is not None:
        at = float(height.of(np.array([plot.threshold.value]))[0])
        axes.axhline(at, color=HAIRLINE, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.annotate(
            words(plot.threshold.label, 30), (0.0, at), (2, 2), ("axes fraction", "data"), "offset points",
            fontsize=SMALL, color=HAIRLINE,
        )  # fmt: skip
    if height.scale == "linear":
        value_axis(axes, plot.unit)
    unit = "" if height.scale == "linear" and plot.unit in ("share", "seconds", "bytes") else axis_unit(plot.unit)
    axes.set_ylabel(unit.strip(" ()"), labelpad=2)
    label_ends(axes, ends)


def _seen(axes: Any, evidence: Evidence, case: Case) -> None:
    """Mark the rounds in which it was found on the axis, and shade the time since it began."""
    colour, shape = SEVERITY.get(case.severity, SEVERITY["note"])
    if evidence.since is not None and evidence.seen:
        axes.axvspan(evidence.since - 0.5, max(evidence.seen) + 0.5, color=colour, alpha=0.07, linewidth=0, zorder=0)
    axes.plot(
        evidence.seen, [1.0] * len(evidence.seen), shape, color=colour, markersize=3, clip_on=False,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
