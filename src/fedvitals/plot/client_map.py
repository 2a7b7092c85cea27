# SPDX-License-Identifier: Apache-2.0
"""A heat map of one vital sign, clients × rounds, with the clients in trouble first."""

from __future__ import annotations

from fedvitals.errors import ConfigError
from fedvitals.plot.canvas import Figure, drawn, flags, nothing, round_axis
from fedvitals.plot.cells import cell_sheet, colour_scale, draw_cells, shades_of
from fedvitals.plot.source import Which, check_sign, opened
from fedvitals.plot.style import words
from fedvitals.store import Target
from fedvitals.views.cases import cases_of
from fedvitals.views.heat import Sort, client_grid
from fedvitals.views.overview import overview

ROWS, COLUMNS = 100, 400
SIGNED = ("update.cosine_mean", "update.cosine_previous")


@drawn
def clients(
    run: Which, sign: str | None = None, *, sort: Sort = "worst", rows: int = ROWS, store: Target = None
) -> Figure:
    """Draw one sign of all clients in all rounds, sorted by «worst», «value» or «name»."""
    if sort not in ("worst", "value", "name"):
        raise ConfigError(f"Clients are sorted by 'worst', 'value' or 'name', got '{sort}'.")
    with opened(run, store) as (reader, chosen):
        if sign is not None:
            check_sign(reader, chosen, sign)
        sign = sign or overview(reader, chosen).sign
        cases = cases_of(reader, chosen)
        cells = None if sign is None else client_grid(reader, chosen, sign, sort=sort, limit=rows, columns=COLUMNS)
    if cells is None or sign is None or not cells.rows:
        return nothing("No client told anything that could be shown.", "Clients tell in `monitor.client(...)`.")
    shown = f"{len(cells.rows)} of {cells.total_rows} clients" if len(cells.rows) < cells.total_rows else ""
    order = {"worst": "worst first", "value": "largest first", "name": "by name"}[sort]
    figure, axes, top = cell_sheet(len(cells.rows), words(sign, 40), ", ".join(w for w in (shown, order) if w))
    shades = shades_of(cells, signed=sign in SIGNED)
    draw_cells(axes, cells, shades)
    colour_scale(top, shades, cells.unit)
    flags(axes, cases)
    round_axis(axes, (cells.columns[0], cells.last[-1]))
    return figure
