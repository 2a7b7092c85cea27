# SPDX-License-Identifier: Apache-2.0
"""Numbers and small pictures for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedvitals.views.axis_ends import honest_ends
from fedvitals.views.units import number, seconds, size, with_unit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from fedvitals.views.verdict import Verdict

__all__ = [
    "APART", "WIDE", "new_console", "new_progress", "new_table", "number", "print_verdict", "seconds", "shown",
    "size", "sparkline", "with_unit",
]  # fmt: skip

BARS = "▁▂▃▄▅▆▇█"
WIDE = 10_000  # columns of a pipe
APART = (0, 2, 0, 0)  # padding for tables whose columns are further apart


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console without automatic highlighting."""
    from rich.console import Console

    return Console(highlight=False, stderr=stderr, width=width)


def new_progress(*texts: str, transient: bool = False) -> Progress:
    """Return a progress bar on standard error; `texts`: formats of further columns, such as «{task.fields[loss]}»."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, texts)
    return Progress(*columns, TimeRemainingColumn(), console=new_console(stderr=True), transient=transient)


def new_table(*titles: str, no_wrap: bool = False, **how: Any) -> Table:
    """Return a table without lines, with these columns; a title that begins with «>» is for a column of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, **how)
    for title in titles:
        justify: Any = "right" if title.startswith(">") else "left"
        table.add_column(title.removeprefix(">"), justify=justify, no_wrap=no_wrap)
    return table


def sparkline(values: Sequence[float], width: int = 24, unit: str = "") -> str:
    """Return values as small blocks, with a gap for missing ones. Long series keep each bucket's last value."""
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "·" * len(values)
    low, high = honest_ends(min(finite), max(finite), unit)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "·" for v in values)


def shown_node(node: str) -> str:
    """Return a node's name, safe for a terminal, a long number by its last digits; for tables and lists."""
    from fedvitals.views.short_ids import short

    return shown(short(node))


def shown(text: str) -> str:
    """Return text from a record, safe for a terminal: no control characters, no markup."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))


def print_verdict(console: Any, verdict: Verdict) -> None:
    """Print the verdict on a run in the dashboard's words: what happened, what was seen, what to do first."""
    console.print(f"[bold]{shown(verdict.sentence)}[/bold]", soft_wrap=True)
    if verdict.why:
        console.print(shown(verdict.why), soft_wrap=True)
    if verdict.next_step:
        console.print(f"[bold]Next step:[/bold] {shown(verdict.next_step)}", soft_wrap=True)
    console.print(f"[dim]{shown(verdict.detail)}[/dim]", soft_wrap=True)
