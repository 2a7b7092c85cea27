# SPDX-License-Identifier: Apache-2.0
"""One round, node by node: what each did when, with the critical path outlined."""

from __future__ import annotations

from fedvitals.palette import part_colour
from fedvitals.plot.canvas import SMALL, Figure, drawn, head, legend, nothing, panel, value_axis
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import INK, words
from fedvitals.store import Target
from fedvitals.views.round import RoundPage, lengths_of, round_page

LANES = 40


@drawn
def waterfall(
    run: Which,
    round_index: int | None = None,
    *,
    lanes: int = LANES,
    store: Target = None,
) -> Figure:
    """Draw the waterfall of a round: who worked when, and the chain of work that made it so long.

    Args:
        run: An id, the beginning of one, a name (its newest run), a run of `fv.open(...)`, or `(reader, id)`.
        round_index: The round; by default the longest.
        lanes: How many nodes to draw.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    with opened(run, store) as (reader, chosen):
        if round_index is None:
            round_index = longest(lengths_of(reader, chosen, "virtual") or lengths_of(reader, chosen, "real"))
        if round_index is None:
            return nothing("No round was timed.", "`monitor.round(...)` times them.")
        page = round_page(reader, chosen, round_index, limit=lanes)
    return draw_waterfall(page)


def longest(lengths: dict[int, float]) -> int | None:
    """Return the longest round, leaving out the first if there are others: it mostly shows the warm-up."""
    rest = {number: seconds for number, seconds in lengths.items() if number != min(lengths)} or lengths
    return max(rest, key=lambda number: rest[number], default=None)


@drawn
def draw_waterfall(page: RoundPage) -> Figure:
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

    if not page.timed or not page.lanes:
        return nothing(f"Nothing of round {page.round} was timed.")
    count = len(page.lanes)
    figure, axes = panel(0.8 + 0.17 * count)
    seen: dict[str, str] = {}
    for row, lane in enumerate(page.lanes):
        for part in lane.parts:
            seen.setdefault(part.name, part_colour(part.name))
        bars = [(part.start, part.seconds) for part in lane.parts]
        colours = [part_colour(part.name) for part in lane.parts]
        axes.broken_barh(bars, (row + 0.12, 0.76), facecolors=colours, linewidth=0)
        own = [(part.start, part.seconds) for part in lane.parts if part.critical]
        for start, seconds in _joined(own):
            axes.broken_barh([(start, seconds)], (row + 0.06, 0.88), facecolors="none", edgecolors=INK, linewidth=0.9)
    names = [f"{words(lane.node, 18)}{' ✕' if lane.failed else ''}" for lane in page.lanes]
    axes.set_yticks([row + 0.5 for row in range(count)], names, usetex=False)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.set(ylim=(count, 0), xlim=(0, page.seconds or 1))
    note = f"{count} of {page.total} nodes, the slowest first" if count < page.total else "outlined: the critical path"
    head(axes, f"round {page.round}", f"{note}; {page.clock} clock")
    value_axis(axes, "seconds", "x")
    legend(axes, [Patch(color=colour, linewidth=0) for colour in seen.values()], list(seen))
    return figure


def _joined(bars: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge periods that follow each other."""
    joined: list[tuple[float, float]] = []
    for start, seconds in bars:
        if joined and start - sum(joined[-1]) <= 1e-9 + 1e-3 * seconds:
            joined[-1] = (joined[-1][0], start + seconds - joined[-1][0])
        else:
            joined.append((start, seconds))
    return joined
