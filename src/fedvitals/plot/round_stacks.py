# SPDX-License-Identifier: Apache-2.0
"""What each round took, as stacked bars: seconds by part of the work, and bytes on the wire."""

from __future__ import annotations

import numpy as np

from fedvitals.analysis.traffic import Traffic, traffic_of
from fedvitals.palette import part_colour
from fedvitals.plot import canvas
from fedvitals.plot.canvas import Figure, drawn
from fedvitals.plot.source import Which, opened
from fedvitals.records import Event, Transfer
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from fedvitals.views.phases import phases as phases_of
from fedvitals.views.units import seconds, size

POINTS = 200
TALL = 4.0  # times the usual round: longer ones are cut off, with a note


@drawn
def phases(run: Which, *, store: Target = None) -> Figure:
    """Draw the seconds of each round's critical path by part of the work, stacked.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        phases_page = phases_of(reader, chosen, POINTS)
        cases = [case for case in cases_of(reader, chosen) if case.issue_entry.family == "system"]
    if not phases_page.rounds:
        return canvas.nothing("No round was timed.", "`monitor.round(...)` times them.")
    figure, axes = canvas.panel(2.4)
    below = np.zeros(len(phases_page.rounds))
    widths = [max(1, last - first + 1) * 0.88 for first, last in zip(phases_page.first, phases_page.last, strict=True)]
    middles = [(first + last) / 2 for first, last in zip(phases_page.first, phases_page.last, strict=True)]
    for part in phases_page.parts:
        values = np.nan_to_num(canvas.numbers(part.values))
        axes.bar(middles, values, widths, below, color=part_colour(part.name), label=part.name, linewidth=0)
        below += values
    usual = float(np.median(below[below > 0])) if (below > 0).any() else 1.0
    cut = below > TALL * usual
    if cut.any() and cut.sum() <= max(1, len(below) // 10):
        axes.set_ylim(0, TALL * usual)
        for place in np.flatnonzero(cut):
            axes.annotate(
                seconds(below[place]), (middles[place], TALL * usual), ha="left", va="top", fontsize=canvas.SMALL
            )
    canvas.head(axes, "time of a round, by part of its critical path", f"{phases_page.clock} clock")
    canvas.value_axis(axes, "seconds")
    canvas.legend(axes, reverse=True)
    canvas.flags(axes, cases)
    canvas.round_axis(axes, (phases_page.first[0], phases_page.last[-1]))
    return figure


@drawn
def traffic(run: Which, *, store: Target = None) -> Figure:
    """Draw what clients sent and received in each round, and what went between edges and server.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        described = queries.get_run(reader, chosen)
        run_traffic = traffic_of(
            queries.records(reader, chosen, Transfer),
            queries.records(reader, chosen, Event),
            queries.attendance(reader, chosen),
            described.tables,
            described.topology,
        )
    return draw_traffic(run_traffic)


@drawn
def draw_traffic(run_traffic: Traffic) -> Figure:
    moved = [own for own in run_traffic.rounds if own.bytes or own.telemetry_bytes]
    if not moved:
        return canvas.nothing(
            "No transfers were recorded.", "`monitor.transfer(...)` records them; the lab does so by itself."
        )
    figure, axes = canvas.panel(2.0)
    rounds = np.array([own.round for own in moved])
    below = np.zeros(len(moved))
    for name, part, values in (
        ("up", "up", [own.up.bytes for own in moved]),
        ("down", "down", [own.down.bytes for own in moved]),
        ("between edges and server", "between", [own.between.bytes for own in moved]),
        ("telemetry", "telemetry", [own.telemetry_bytes for own in moved]),
    ):
        if any(values):
            axes.bar(rounds, values, 0.88, below, color=part_colour(part), label=name, linewidth=0)
            below += np.array(values, float)
    without = ", without telemetry" if run_traffic.telemetry_bytes else ""
    canvas.head(axes, "bytes of a round", f"{size(run_traffic.bytes)} in all{without}")
    canvas.value_axis(axes, "bytes")
    canvas.legend(axes, reverse=True)
    canvas.round_axis(axes, rounds.tolist())
    return figure
