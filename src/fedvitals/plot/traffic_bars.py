# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire in each round, up and down, and the share of telemetry."""

from __future__ import annotations

import numpy as np

from fedvitals.analysis.traffic import Traffic, traffic_of
from fedvitals.plot.canvas import Figure, drawn, head, legend, nothing, panel, round_axis, value_axis
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import GREEN, ORANGE, PURPLE, VERMILLION
from fedvitals.records import Event, Transfer
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.units import size


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
    moved = [own for own in run_traffic.rounds if own.bytes or own.telemetry_bytes]
    if not moved:
        return nothing("No transfer was told.", "`monitor.transfer(...)` tells of them; the lab does by itself.")
    figure, axes = panel(2.0)
    rounds = np.array([own.round for own in moved])
    below = np.zeros(len(moved))
    for name, colour, values in (
        ("up", VERMILLION, [own.up.bytes for own in moved]),
        ("down", GREEN, [own.down.bytes for own in moved]),
        ("between edges and server", PURPLE, [own.between.bytes for own in moved]),
        ("telemetry", ORANGE, [own.telemetry_bytes for own in moved]),
    ):
        if any(values):
            axes.bar(rounds, values, 0.88, below, color=colour, label=name, linewidth=0)
            below += np.array(values, float)
    without = ", without telemetry" if run_traffic.telemetry_bytes else ""
    head(axes, "bytes of a round", f"{size(run_traffic.bytes)} in all{without}")
    value_axis(axes, "bytes")
    legend(axes, reverse=True)
    round_axis(axes, rounds.tolist())
    return figure
