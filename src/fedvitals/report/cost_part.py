# SPDX-License-Identifier: Apache-2.0
"""The report's section on time, memory and bytes."""

from __future__ import annotations

from collections.abc import Mapping

from fedvitals import plot
from fedvitals.plot.round_stacks import draw_traffic
from fedvitals.plot.round_waterfall import draw_waterfall
from fedvitals.report.markup import Block, Heading, Table, Text, literal
from fedvitals.report.pictures import Pictures
from fedvitals.store.read.reader import Reader
from fedvitals.views.labels import labels_of, named
from fedvitals.views.profile import Profile
from fedvitals.views.round import round_page
from fedvitals.views.units import number, seconds, size, whole_percent

LANES, ROWS = 30, 8


def cost_part(reader: Reader, run: str, profile: Profile, pictures: Pictures) -> list[Block]:
    """Return the section as blocks."""
    blocks: list[Block] = [Heading(2, "Time, memory and bytes")]
    if profile.verdict is None:
        blocks.append(Text("No round was timed."))
    else:
        blocks.append(Text(literal(profile.verdict.text)))
        words = f"seconds of each round by part, on the {profile.clock} clock"
        blocks.append(pictures.of("phases", words, lambda: plot.phases((reader, run))))
        blocks += _round(reader, run, profile, pictures)
        blocks += [
            table for table in (_stragglers(profile, labels_of(reader, run)), _remedies(profile)) if table is not None
        ]
    blocks += _memory(profile)
    if profile.traffic.bytes:
        up, down = profile.traffic.up, profile.traffic.down
        pressed = f", compressed {up.compression:.3g} times" if up.compression and up.compression > 1.005 else ""
        own = profile.traffic.telemetry_bytes
        share = f". Telemetry, {size(own)}, is not in these" if own else ""
        both = f"{size(up.bytes)} up{pressed}, {size(down.bytes)} down{share}"
        blocks.append(Text(f"{size(profile.traffic.bytes)} on the wire: {both}."))
        blocks.append(pictures.of("traffic", "bytes of each round, up and down", lambda: draw_traffic(profile.traffic)))
    else:
        blocks.append(Text("No transfer was told: `monitor.transfer(...)` does, and the lab by itself.", "quiet"))
    return blocks


def _round(reader: Reader, run: str, profile: Profile, pictures: Pictures) -> list[Block]:
    """The round that is most worth a look: the longest that is no warm-up."""
    verdict = profile.verdict
    warm = verdict.warm_up.round if verdict is not None and verdict.warm_up is not None else None
    times = [time for time in profile.times if time.round != warm] or list(profile.times)
    if not times:
        return []
    shown = max(times, key=lambda time: time.seconds)
    page = round_page(reader, run, shown.round, clock=profile.clock, limit=LANES)
    words = f"round {shown.round}, node by node, with its critical path outlined"
    return [Text(literal(page.headline)), pictures.of("waterfall", words, lambda: draw_waterfall(page))]


def _stragglers(profile: Profile, labels: Mapping[str, str]) -> Table | None:
    rows = tuple(
        (literal(named(straggler.node, labels), 60), f"{straggler.determined} of {straggler.rounds}",
         seconds(straggler.seconds_lost), literal(straggler.part), seconds(straggler.typical), seconds(straggler.peers))
        for straggler in profile.stragglers[:ROWS]
        if straggler.seconds_lost > 0
    )  # fmt: skip
    head = ("client", "rounds determined", "time lost", "slow in", "usually takes", "its peers")
    return Table("Who was waited for", head, rows, numbers=frozenset({1, 2, 4, 5})) if rows else None


def _remedies(profile: Profile) -> Table | None:
    rows = tuple(
        (
            literal(remedy.name),
            seconds(remedy.after),
            f"{'up to ' if remedy.at_most else ''}{whole_percent(remedy.share)}",
            literal(remedy.costs),
        )
        for remedy in profile.remedies[:ROWS]
        if remedy.share > 0.005
    )
    if not rows:
        return None
    now = seconds(profile.remedies[0].before)
    note = f"A round takes {now} now. Computed from its times; `fedvitals profile --try` runs them again, in the lab."
    head = ("what would help", "a round then", "saved", "costs")
    return Table("What would help", head, rows, note, frozenset({1, 2}))


def _memory(profile: Profile) -> list[Block]:
    memory = profile.memory
    if memory is None:
        return [Text("No memory was measured.", "quiet")]
    rows = tuple(
        (f"`{peak.metric}`", size(peak.bytes), literal(peak.node or "the run", 40), str(peak.round),
         f"{'+' if peak.growth_bytes > 0 else ''}{size(peak.growth_bytes)}".replace("-", "−"))
        for peak in memory.peaks[:ROWS]
    )  # fmt: skip
    blocks: list[Block] = [
        Table("Memory", ("metric", "extreme", "of", "round", "growth over the run"), rows, numbers=frozenset({1, 3, 4}))
    ]
    if memory.shares and memory.node is not None:
        parts = ", ".join(f"{name} {size(value)}" for name, value in memory.shares.items())
        batch = f", at batches of {number(memory.batch)}" if memory.batch else ""
        blocks.append(Text(f"Largest in tensors: {literal(memory.node, 40)}: {parts}{batch}."))
    return blocks
