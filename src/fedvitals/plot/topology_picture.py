# SPDX-License-Identifier: Apache-2.0
"""Which nodes exchange data in a round: star, clusters, tree or rings, coloured by health."""

from __future__ import annotations

import math
from typing import Any

from fedvitals.plot.canvas import Figure, drawn, head, nothing, panel
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import HAIRLINE, INK, NOT_THERE, SEVERITY, words
from fedvitals.store import Target
from fedvitals.views.topology import PlacedNode, TopologyPage, topology_page
from fedvitals.views.units import size

Place = tuple[float, float]
NAMED = 40  # nodes that are all named; with more, only servers, groups and unhealthy nodes
WIDEST = 3.0  # points, for the edge with the most bytes


@drawn
def topology(run: Which, round_index: int | None = None, *, store: Target = None) -> Figure:
    """Draw the federation as it was in a round, by default the newest.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        round_index: The round; by default the newest.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        if not reader.history(chosen).rounds():
            return nothing("The run has no round yet.")
        page = topology_page(reader, chosen, round_index)
    figure, axes = panel(4.4)
    places = places_of(page)
    most = max((edge.bytes for edge in page.edges), default=0.0) or 1.0
    for edge in page.edges:
        if edge.sender in places and edge.receiver in places:
            (x, y), (u, v) = places[edge.sender], places[edge.receiver]
            width = max(0.3, WIDEST * math.sqrt(edge.bytes / most))
            axes.plot([x, u], [y, v], color=HAIRLINE, linewidth=width, alpha=0.35, zorder=1, solid_capstyle="round")
    all_named = len(page.nodes) <= NAMED
    for node in page.nodes:
        _dot(axes, node, places[node.name], named=all_named or node.role != "client" or node.health in SEVERITY)
    moved = f"{size(page.bytes)} moved" if page.has_transfers else "no transfers were recorded"
    note = f"{page.took_part} of {page.clients} clients took part; {moved}"
    head(axes, f"{words(page.topology or page.kind, 30)}, round {page.round}", note)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.set_axis_off()
    return figure


def _dot(axes: Any, node: PlacedNode, place: Place, *, named: bool) -> None:
    colour, shape = {"ok": ("#ffffff", "o"), "absent": (NOT_THERE, "o"), "failed": ("#ffffff", "X")}.get(
        node.health, SEVERITY.get(node.health, SEVERITY["note"])
    )
    large = {"server": 9.0, "group": 7.0}.get(node.role, 4.5 + min(8.0, math.log2(node.count)))
    shape = "D" if node.role == "server" and node.health == "ok" else shape
    axes.plot(
        [place[0]],
        [place[1]],
        shape,
        color=colour,
        markersize=large,
        markeredgecolor=INK,
        markeredgewidth=0.6,
        zorder=3,
    )
    if named:
        axes.annotate(
            words(node.name, 22),
            place,
            (0, -large / 2 - 3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=6.5,
        )


def places_of(page: TopologyPage) -> dict[str, Place]:
    """Return the place of each node: the server in the middle, groups around it, clients around their groups."""
    leaves = [node for node in page.nodes if node.role in ("client", "clients")]
    inner = [node for node in page.nodes if node.role == "group"]
    places: dict[str, Place] = {node.name: (0.0, 0.0) for node in page.nodes if node.role == "server"}
    groups = list(dict.fromkeys([*(node.name for node in inner), *(node.group for node in leaves if node.group)]))
    alone = [node.name for node in leaves if node.group not in groups]
    places |= _circle(alone, (0.0, 0.0), 1.0)
    if not groups:
        return places
    middles = _circle(groups, (0.0, 0.0), 1.0 if not alone else 1.8)
    # No two neighbouring circles of clients may touch.
    reach = 0.42 if len(groups) < 3 else min(0.42, 0.9 * math.sin(math.pi / len(groups)))
    for group, middle in middles.items():
        members = [node.name for node in leaves if node.group == group]
        places |= _circle(members, middle, reach, math.atan2(middle[1], middle[0]))
    return places | {node.name: middles[node.name] for node in inner}


def _circle(names: list[str], middle: Place, radius: float, turn: float = math.pi / 2) -> dict[str, Place]:
    step = 2 * math.pi / max(1, len(names))
    return {
        name: (middle[0] + radius * math.cos(turn + i * step), middle[1] + radius * math.sin(turn + i * step))
        for i, name in enumerate(names)
    }
