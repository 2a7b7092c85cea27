# SPDX-License-Identifier: Apache-2.0
"""Heat maps over the rounds: one vital sign of the clients, those in trouble first, and one statistic of the layers."""

from __future__ import annotations

from fedvitals.errors import ConfigError, unknown
from fedvitals.plot.canvas import Figure, drawn, flags, nothing, round_axis
from fedvitals.plot.cells import cell_sheet, colour_scale, draw_cells, shades_of
from fedvitals.plot.source import Which, check_sign, opened
from fedvitals.plot.style import words
from fedvitals.stats import FAMILIES, statistics_of
from fedvitals.store import Target
from fedvitals.store.read.layer_history import layer_history
from fedvitals.views.cases import cases_of
from fedvitals.views.heat import Sort, client_grid
from fedvitals.views.layers import grid_of
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.overview import overview
from fedvitals.views.shown_statistics import shown_statistic

ROWS, COLUMNS = 100, 400
SIGNED_STATISTICS = ("mean", "sum", "min", "max", "cosine_mean", "cosine_previous")
SHARES = ("sparsity", "dead_fraction", "saturated_fraction", "sign_diversity", "share")
SIGNED = ("update.cosine_mean", "update.cosine_previous")


@drawn
def clients(
    run: Which, sign: str | None = None, *, sort: Sort = "worst", rows: int = ROWS, store: Target = None
) -> Figure:
    """Draw one sign of all clients in all rounds.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        sign: The metric, such as «update.norm»; by default the one that the overview shows.
        sort: The order of the clients: «worst», «value» or «name».
        rows: How many clients to draw.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    if sort not in ("worst", "value", "name"):
        raise ConfigError(f"Clients are sorted by 'worst', 'value' or 'name', got '{sort}'.")
    with opened(run, store) as (reader, chosen):
        if sign is not None:
            check_sign(reader, chosen, sign)
        sign = sign or overview(reader, chosen).sign
        cases = cases_of(reader, chosen)
        cells = None if sign is None else client_grid(reader, chosen, sign, sort=sort, limit=rows, columns=COLUMNS)
    if cells is None or sign is None or not cells.rows:
        return nothing("No client reported anything that could be shown.", "Clients report in `monitor.client(...)`.")
    shown = f"{len(cells.rows)} of {cells.total_rows} clients" if len(cells.rows) < cells.total_rows else ""
    order = {"worst": "worst first", "value": "largest first", "name": "by name"}[sort]
    figure, axes, top = cell_sheet(
        len(cells.rows), words(metric_title(sign), 50), ", ".join(w for w in (shown, order) if w)
    )
    shades = shades_of(cells, signed=sign in SIGNED)
    draw_cells(axes, cells, shades)
    colour_scale(top, shades, cells.unit)
    flags(axes, cases)
    round_axis(axes, (cells.columns[0], cells.last[-1]))
    return figure


@drawn
def layers(run: Which, family: str = "gradient", statistic: str = "", *, store: Target = None) -> Figure:
    """Draw a statistic of every layer in every round, the first layer on top.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        family: «gradient», «weight», «update» or another family of docs/metrics.md.
        statistic: The statistic, such as «rms» or «l2».
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
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
    values = shown_statistic(family, history.matrix, statistic)
    grid = grid_of(history, values, "", columns=COLUMNS)
    figure, axes, top = cell_sheet(len(grid.rows), f"{family}, {statistic} of each layer", "first layer on top")
    signed = statistic in SIGNED_STATISTICS
    shades = shades_of(grid, signed=signed, log=False if signed or statistic in SHARES else None)
    draw_cells(axes, grid, shades)
    colour_scale(top, shades, "share" if statistic in SHARES else "1")
    flags(axes, cases)
    round_axis(axes, (grid.columns[0], grid.last[-1]))
    return figure
