# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire in each round, up and down, and the share of telemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedvitals.analysis.traffic import Traffic, traffic_of
from fedvitals.plot.canvas import SMALL, drawn, head, nothing, round_axis, sheet, value_axis
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import GREEN, ORANGE, PURPLE, VERMILLION
from fedvitals.records import Event, Transfer
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.units import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@drawn
def traffic(run: Which, *, store: Target = None) -> Figure:
    """Draw what clients sent and received in each round, and what went between edges and server."""
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
    moved = [
        round_traffic for round_traffic in run_traffic.rounds if round_traffic.bytes or round_traffic.telemetry_bytes
    ]
    if not moved:
        return nothing("No transfer was told.", "`monitor.transfer(...)` tells of them; the lab does by itself.")
    figure, grid = sheet(1, 2.0)
    axes = grid[0, 0]
    rounds = np.array([round_traffic.round for round_traffic in moved])
    below = np.zeros(len(moved))
    for name, colour, values in (
        ("up", VERMILLION, [round_traffic.up.bytes for round_traffic in moved]),
        ("down", GREEN, [round_traffic.down.bytes for round_traffic in moved]),
        ("between edges and server", PURPLE, [round_traffic.between.bytes for round_traffic in moved]),
        ("telemetry", ORANGE, [round_traffic.telemetry_bytes for round_traffic in moved]),
    ):
        if any(values):
            axes.bar(rounds, values, 0.88, below, color=colour, label=name, linewidth=0)
            below += np.array(values, float)
    head(
        axes,
        "bytes of a round",
        f"{size(run_traffic.bytes)} in all{', without telemetry' if run_traffic.telemetry_bytes else ''}",
    )
    value_axis(axes, "bytes")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL, handlelength=1, reverse=True
    )
    round_axis(axes, rounds.tolist())
    return figure
