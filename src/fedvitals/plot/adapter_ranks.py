# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: their spectrum and ranks over the rounds, errors of the aggregation, and each client's part."""

from __future__ import annotations

from typing import Any

from fedvitals.plot.canvas import (
    Figure,
    drawn,
    empty,
    flags,
    head,
    legend,
    line,
    nothing,
    round_axis,
    sheet,
    value_axis,
)
from fedvitals.plot.cells import Shades, draw_cells
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, words
from fedvitals.stats import DIRECTIONS
from fedvitals.store import Target
from fedvitals.views.adapters import AdapterCurve, AdaptersPage, adapters_page
from fedvitals.views.cases import cases_of
from fedvitals.views.grid import Grid

HEIGHTS = (2.0, 1.4, 1.4, 2.0)  # inches
NAMED = 12  # rows of a heat map of 2 inches that are all named
ISSUES = ("RANK_COLLAPSE", "ADAPTER_AGGREGATION_BIAS", "ADAPTER_SCALE_MISMATCH", "DEAD_ADAPTER", "FORGETTING")


@drawn
def adapters(run: Which, layer: str | None = None, round_index: int | None = None, *, store: Target = None) -> Figure:
    """Draw the low-rank adapters of a run: all together, or those of one layer.

    From the top: the shares of their singular directions by round, effective and stable rank, the error of the
    aggregation, and each client's part in the directions.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        layer: The layer whose adapter is drawn; None: all.
        round_index: The round of the clients' parts; by default the newest.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        page = adapters_page(reader, chosen, layer, round_index)
        cases = [case for case in cases_of(reader, chosen) if case.issue in ISSUES]
    if page.spectrum is None:
        return nothing(
            "No low-rank adapters were measured.",
            page.trained or "They are known in the global model of `monitor.round(number, model)`.",
        )
    figure, grid = sheet(4, heights=HEIGHTS)
    spectrum, ranks, errors, parts = grid[:, 0]
    which = words(layer, 40) if layer else f"mean over {len(page.layers)} adapters"
    directions = f"energy, first {DIRECTIONS} directions" if page.beyond else "energy by direction"
    _draw_grid(spectrum, page.spectrum, directions, f"{which}; bright: all", (0.0, 1.0))
    _draw_curves(ranks, page.ranks, "rank in use", "directions")
    _draw_curves(errors, (*page.errors, *page.energies), "error of B A, energy in the upper directions", "share")
    for axes in (spectrum, ranks, errors):
        round_axis(axes, _rounds(page), label=axes is errors)
    flags(spectrum, cases)
    if page.contributions is None:
        empty(parts, "No client's adapters were measured.")
    else:
        note = f"round {page.round}; blue: against it"
        _draw_grid(parts, page.contributions, "clients' parts", note, None)
        parts.set_xlabel("singular direction", labelpad=1)
    return figure


def _rounds(page: AdaptersPage) -> tuple[int, int]:
    grid = page.spectrum
    return (0, 0) if grid is None else (grid.columns[0], grid.last[-1])


def _draw_grid(axes: Any, grid: Grid, title: str, note: str, ends: tuple[float, float] | None) -> None:
    low, high = ends or (grid.low or 0.0, grid.high or 1.0)
    draw_cells(axes, grid, Shades(low, high, signed=ends is None), NAMED)
    head(axes, title, note)


def _draw_curves(axes: Any, curves: tuple[AdapterCurve, ...], title: str, unit: str) -> None:
    for curve, colour in zip(curves, COLOURS, strict=False):
        line(axes, curve.rounds, curve.values, colour, label=curve.words)
    value_axis(axes, unit)
    head(axes, title)
    if curves:
        legend(axes)
