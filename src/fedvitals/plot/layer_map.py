# SPDX-License-Identifier: Apache-2.0
"""A heat map of one statistic, layers × rounds, which shows where a gradient vanishes or explodes, and since when."""

from __future__ import annotations

from fedvitals.errors import ConfigError, unknown
from fedvitals.plot.canvas import Figure, drawn, flags, nothing, round_axis
from fedvitals.plot.cells import cell_sheet, colour_scale, draw_cells, shades_of
from fedvitals.plot.source import Which, opened
from fedvitals.stats import FAMILIES, derive, statistics_of
from fedvitals.store import Target
from fedvitals.store.read.layer_history import layer_history
from fedvitals.views.cases import cases_of
from fedvitals.views.layers import grid_of

COLUMNS = 400
SIGNED = ("mean", "sum", "min", "max", "cosine_mean", "cosine_previous")
SHARES = ("sparsity", "dead_fraction", "saturated_fraction", "sign_diversity", "share")


@drawn
def layers(run: Which, family: str = "gradient", statistic: str = "", *, store: Target = None) -> Figure:
    """Draw a statistic (by default «rms») of every layer in every round, the first layer on top."""
    if family not in FAMILIES:
        raise ConfigError(unknown("family of layer statistics", family, FAMILIES))
    known = statistics_of(family)
    statistic = statistic or ("rms" if "rms" in known else known[-1])
    if statistic not in known:
        raise ConfigError(unknown(f"statistic of family '{family}'", statistic, known))
    with opened(run, store) as (reader, chosen):
        history = layer_history(reader, chosen, family)
        cases = [case for case in cases_of(reader, chosen) if case.layer is not None or case.node is None]
    if not history.rounds:
        return nothing(f"No statistics of the layers' '{family}' were kept.", 'Monitor(probes="deep") keeps most.')
    values = derive(family, history.matrix, statistic)
    grid = grid_of(history, values, "", columns=COLUMNS)
    figure, axes, top = cell_sheet(len(grid.rows), f"{family}, {statistic} of each layer", "first layer on top")
    signed = statistic in SIGNED
    shades = shades_of(grid, signed=signed, log=False if signed or statistic in SHARES else None)
    draw_cells(axes, grid, shades)
    colour_scale(top, shades, "share" if statistic in SHARES else "1")
    flags(axes, cases)
    round_axis(axes, (grid.columns[0], grid.last[-1]))
    return figure
