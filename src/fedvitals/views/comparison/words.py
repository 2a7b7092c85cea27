# SPDX-License-Identifier: Apache-2.0
"""Says in sentences what changed between runs, by how much, whether by chance, and why."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.views.comparison.chance import Change
from fedvitals.views.comparison.divergence_point import NOISE, Differing, DivergencePoint
from fedvitals.views.comparison.runs import Comparison, ComparisonRow, Side

NAMED = 3  # settings and clients in a sentence


def in_words(comparison: Comparison) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return sentences on what changed on each side, on where each diverges from the first, and on chance."""
    base = comparison.sides[0]
    sentences = [_what_changed(comparison, place, side) for place, side in enumerate(comparison.sides[1:])]
    cause = _cause(comparison)
    points = zip(comparison.sides[1:], comparison.partings, strict=True)
    partings = [_parting(base, side, point) for side, point in points]
    return (*sentences, *([cause] if cause else [])), tuple(partings), _chance(comparison)


def called(side: Side) -> str:
    """«B (slow)»: two sides may have one name."""
    repeats = f", {len(side.runs)} runs" if len(side.runs) > 1 else ""
    return f"{side.letter} ({side.name}{repeats})"


def _what_changed(comparison: Comparison, place: int, side: Side) -> str:
    rows = {row.name: row for row in comparison.rows}
    learning = next((rows[name] for name in ("accuracy, last", "loss, last") if name in rows), None)
    parts = [_of_learning(learning, place)] if learning else []
    round_time = next((row for row in comparison.rows if row.topic == "time"), None)
    for row, noun in (
        (round_time, "round time"),
        (rows.get("all in all, without telemetry"), "bytes"),
        (rows.get("peak memory"), "memory"),
    ):
        if row is not None and (clause := _of_amount(row, place, noun)):
            parts.append(clause)
    issues = rows.get("issues")
    if issues is not None and (change := issues.changes[place]) is not None and change.difference:
        count = abs(change.difference)
        more = "more" if change.difference > 0 else "fewer"
        parts.append(f"{count:.3g} finding{'s' * (count != 1)} {more}")
    sure = [
        row.name
        for row in comparison.rows
        if (c := row.changes[place]) is not None and c.beyond_chance and c.difference
    ]
    changes = "; ".join(part for part in parts if part) or "nothing that can be compared was measured"
    beyond = f" Beyond chance: {'; '.join(sure)}." if sure else ""
    return f"{called(side)} against {called(comparison.sides[0])}: {changes}.{beyond}"


def _of_learning(row: ComparisonRow, place: int) -> str:
    change, name = row.changes[place], row.name.partition(",")[0]
    if change is None:
        return f"no {name} to compare"
    if not change.difference:
        return f"the same {name}"
    if name == "accuracy":
        size = f"{abs(100 * change.difference):.3g} points {'higher' if change.difference > 0 else 'lower'}"
    else:
        size = f"{abs(change.difference):.3g} {'higher' if change.difference > 0 else 'lower'}"
    return f"{name} {size} ({_sure(change)})"


def _of_amount(row: ComparisonRow, place: int, noun: str) -> str:
    """Only what changed by more than a tenth is worth a word."""
    change = row.changes[place]
    if change is None or change.relative is None or abs(change.relative) < 0.1:
        return ""
    if change.beyond_chance is False:
        return ""
    factor = 1 + change.relative
    return f"{noun} × {factor:.3g}"


def _sure(change: Change) -> str:
    if change.beyond_chance is None:
        return "chance not ruled out: too few repeats"
    return "more than chance explains" if change.beyond_chance else "chance may explain it"


def _cause(comparison: Comparison) -> str:
    settings = [s for s in comparison.settings if s.name != "name" and not s.name.startswith("versions.")]
    if not settings:
        differs = [setting.name for setting in comparison.settings if setting.name.startswith("versions.")]
        if differs:
            return f"No setting differs, but versions do: {', '.join(differs[:NAMED])}."
        return "No setting, seed or version differs: what differs lies outside of them."
    named = [f"{setting.name} {_values(comparison.sides, setting.values)}" for setting in settings[:NAMED]]
    more = f" and {len(settings) - NAMED} more" if len(settings) > NAMED else ""
    return f"Settings that differ: {'; '.join(named)}{more}."


def _values(sides: Sequence[Side], values: Sequence[object]) -> str:
    """«0.1 → 0.2» of two; of more, whose is which."""
    if len(values) == 2:
        return " → ".join(map(_short, values))
    return ", ".join(f"{_short(value)} ({side.letter})" for side, value in zip(sides, values, strict=True))


def _short(value: object) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _parting(base: Side, side: Side, point: DivergencePoint) -> str:
    pair = f"{base.letter} and {side.letter}"
    if point.exact is None:
        lengths = "" if point.rounds[0] == point.rounds[1] else f", as far as both go ({min(point.rounds)} rounds)"
        return f"{pair} do not part: accuracy, loss and update norms are bit for bit the same{lengths}."
    text = f"{pair} part in round {point.exact.round}: {_differing(point.exact)}."
    if point.beyond_noise is None:
        text += f" Nowhere by more than {NOISE:g} of the value: floating-point noise."
    elif point.beyond_noise.round != point.exact.round:
        text += (
            f" Beyond floating-point noise first in round {point.beyond_noise.round}: {_differing(point.beyond_noise)}."
        )
    if min(point.repeats) > 1:
        where = f"first in round {point.beyond_repeats}, by {point.beyond_repeats_by}"
        text += f" Beyond what repeats differ by: {where if point.beyond_repeats is not None else 'in no round'}."
    return text


def _differing(what: Differing) -> str:
    words = [f"{name} {_number(a)} against {_number(b)}" for name, (a, b) in what.metrics.items()]
    nodes = list(what.nodes.items())
    if nodes and what.same_nodes:
        named = ", ".join(f"{node} ({_number(a)} against {_number(b)})" for node, (a, b) in nodes[:NAMED])
        more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
        words.append(f"update norms of {named}{more}; the same of {what.same_nodes} clients")
    elif nodes:
        words.append(f"the update norms of all {what.node_count} clients")
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.3g}"


def _chance(comparison: Comparison) -> str:
    """As the comparison itself says it, with this page's way to repeats instead of the command line's."""
    counts: Sequence[int] = [len(side.runs) for side in comparison.sides]
    if max(counts) == 1:
        return (
            "One run each: nothing here tells a difference from chance. Repeat them with other seeds, and take all "
            "repeats of each into the comparison."
        )
    return comparison.confidence
