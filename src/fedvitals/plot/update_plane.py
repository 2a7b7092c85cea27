# SPDX-License-Identifier: Apache-2.0
"""Similarity of the clients' updates in a round: as points in a plane, and as a matrix of cosines."""

from __future__ import annotations

import base64

import numpy as np

from fedvitals.plot.canvas import SMALL, Figure, drawn, head, nothing, panel
from fedvitals.plot.cells import Shades, cell_sheet, colour_scale
from fedvitals.plot.source import Which, opened, suspects
from fedvitals.plot.style import COLOURS, HAIRLINE, SEVERITY, words
from fedvitals.store import Target
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import cases_of
from fedvitals.views.clients import severities
from fedvitals.views.update_map import Layouts, UpdateMap
from fedvitals.views.update_map import update_map as map_of

NAMED = 12  # points with names: those with findings, then those furthest out
MISSING = ("No update was sketched.", "Sketches come from the server's side of `monitor.round(...)`, at any privacy.")


@drawn
def update_map(run: Which, round_index: int | None = None, *, store: Target = None) -> Figure:
    """Draw the directions of a round's updates in the plane that keeps most of their distances.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        round_index: The round; by default the newest.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        update_map_page = _map(reader, chosen, round_index)
    if update_map_page.round is None or not update_map_page.points:
        return nothing(*MISSING)
    figure, axes = panel(2.7)
    groups = sorted({point.group for point in update_map_page.points if point.group})
    far = sorted(update_map_page.points, key=lambda point: (point.severity is None, -np.hypot(point.x, point.y)))
    named = {point.name for point in far[:NAMED]}
    for point in update_map_page.points:
        colour, shape = COLOURS[groups.index(point.group) % len(COLOURS)] if point.group else HAIRLINE, "o"
        if point.severity:
            colour, shape = SEVERITY.get(point.severity, SEVERITY["note"])
        axes.plot([point.x], [point.y], shape, color=colour, markersize=6 if point.severity else 4, alpha=0.85)
        if point.name in named:
            axes.annotate(words(point.name, 16), (point.x, point.y), (4, 3), textcoords="offset points", fontsize=SMALL)
    axes.set_aspect("equal", adjustable="datalim")
    axes.axhline(0, color=HAIRLINE, linewidth=0.3, zorder=0)
    axes.axvline(0, color=HAIRLINE, linewidth=0.3, zorder=0)
    first, second = (100 * share for share in (*update_map_page.shares, 0.0, 0.0)[:2])
    axes.set_xlabel(f"first component, {first:.0f} % of the spread", labelpad=1)
    axes.set_ylabel(f"second, {second:.0f} %", labelpad=1)
    left_out = f"; {update_map_page.unusable} without a direction left out" if update_map_page.unusable else ""
    head(axes, f"updates of round {update_map_page.round}", f"near is alike: squared distance = 2 − 2·cosine{left_out}")
    return figure


@drawn
def similarity(run: Which, round_index: int | None = None, *, store: Target = None) -> Figure:
    """Draw the cosines between the updates of a round's clients, similar clients next to each other.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        round_index: The round; by default the newest.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        update_map_page = _map(reader, chosen, round_index)
        named = suspects(cases_of(reader, chosen), 20)
    cosines = update_map_page.similarity
    if cosines is None or not cosines.names:
        return nothing(*MISSING)
    count = len(cosines.names)
    values = np.frombuffer(base64.b64decode(cosines.values), "<f4").reshape(count, count).astype(float)
    note = "neighbours alike" if count == cosines.total else f"{count} of {cosines.total}: {cosines.chosen}"
    figure, axes, top = cell_sheet(
        min(count, 45), f"cosine between updates, round {update_map_page.round}", words(note, 60)
    )
    shades = Shades(-1, 1, signed=True)
    axes.imshow(
        (255 * shades.of(values) + 0.5).astype(np.uint8), interpolation="none", extent=(0, count, count, 0),
        aspect="equal",
    )  # fmt: skip
    colour_scale(top, shades, "1")
    places = range(count) if count <= 45 else [i for i, name in enumerate(cosines.names) if name in named]
    axes.set_yticks([i + 0.5 for i in places], [words(cosines.names[i], 16) for i in places], usetex=False)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _map(reader: Reader, run: str, round_index: int | None) -> UpdateMap:
    return map_of(reader, run, Layouts(), round_index=round_index, severities=severities(reader, run))
