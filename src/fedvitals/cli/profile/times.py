# SPDX-License-Identifier: Apache-2.0
"""The upper half of `fedvitals profile`: where the time went, who held up the rounds, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from fedvitals.analysis.critical_path import PathLink
from fedvitals.analysis.remedies import LEAST, by_worth
from fedvitals.analysis.stragglers import costly
from fedvitals.analysis.timeline import NodeTime
from fedvitals.cli.bars import GREY, KINDS, RUNS, along, in_lines, percent, percents, stacked, strip
from fedvitals.cli.screen import APART, new_table, seconds, shown, shown_node, sparkline
from fedvitals.views.profile import Profile

NODES = 20  # lines of the waterfall, unless --all
UNEXPLAINED = 0.02  # share of a node's round from which unexplained time is mentioned
OURS = 0.03  # share of the critical path from which measuring is mentioned
MOST_WAITS = 4  # named below a waterfall


def print_times(console: Any, profile: Profile, rows: int | None) -> None:
    """Print the times of a profile; `rows`: how many clients and remedies, None for all."""
    _head(console, profile)
    if profile.verdict is not None:
        _bars(console, profile)
        _rounds(console, profile)
        _waterfall(console, profile, None if rows is None else NODES)
        _stragglers(console, profile, rows)
        _remedies(console, profile, rows)
        _what_if(console, profile, rows)


def _head(console: Any, profile: Profile) -> None:
    verdict, run = profile.verdict, profile.run
    clients = max((len(time.clients) for time in profile.times), default=0)
    if verdict is None:
        console.print(f"[bold]{shown(run.name)}[/bold]  {shown(run.id)}")
        console.print("No round of this run was timed: there is nothing to say about its time.\n")
        _still_open(console, profile)
        return
    other = [clock for clock in profile.clocks if clock != profile.clock]
    hint = f" (also: --clock {other[0]})" if other else ""
    rounds = f"{verdict.rounds} round{'s' * (verdict.rounds != 1)} of {seconds(verdict.seconds)}"
    size = f"{rounds}, {clients} client{'s' * (clients != 1)}"
    console.print(f"[bold]{shown(run.name)}[/bold]  {shown(run.id)}  [dim]{size}, {profile.clock} clock{hint}[/dim]")
    console.print(f"\n[bold]{shown(verdict.text)}[/bold]")
    whole = sum(profile.path_parts.values())
    ours = profile.path_parts.get("measure", 0.0) / whole if whole > 0 else 0.0
    if ours > OURS:
        console.print(f"{percent(ours)} of the critical path is measuring by fedvitals, part of computing here.")
    if profile.worked is not None:
        explanation = "the rest went by in queues, starting processes and waiting for answers"
        console.print(f"In {percent(profile.worked)} of a round somebody worked; {explanation}.")
    _still_open(console, profile)
    console.print()


def _still_open(console: Any, profile: Profile) -> None:
    if profile.run.finished is None:
        left = "" if profile.left_open is None else f" Round {profile.left_open} has no end and is left out."
        console.print(f"The run is still open, or was killed.{left}")


def _bars(console: Any, profile: Profile) -> None:
    """Print one bar each for the rounds' length, the clients' time and the server's."""
    console.print("[bold]Where the time went[/bold]")
    every = {"rounds": profile.path_parts, "clients": profile.client_parts, "server": profile.server_parts}
    bars = {title: parts for title, parts in every.items() if sum(parts.values()) > 0}
    totals = {title: seconds(sum(parts.values())) for title, parts in bars.items()}
    width = max(10, console.width - 12 - max(map(len, totals.values()), default=0))
    for title, parts in bars.items():
        console.print(Text.assemble(f"  {title:8}", stacked(parts, width), f"  {totals[title]}"), no_wrap=True)
    for title, parts in bars.items():
        for line in in_lines(f"  {title:8}", percents(parts), console.width):
            console.print(line)
    console.print("  [dim]rounds: along the critical path; clients: all of their time, waiting included[/dim]")
    if waited := profile.waiting.in_words():
        console.print(f"  [dim]{shown(waited)}.[/dim]")
    if profile.unaccounted is not None and profile.unaccounted > UNEXPLAINED:
        share = percent(profile.unaccounted)
        console.print(
            f"  [dim]Up to {share} of a node's round, in the median round, is in no part: unaccounted for.[/dim]"
        )
    console.print()


def _rounds(console: Any, profile: Profile) -> None:
    """Print the rounds from left to right: how long, and what bound them."""
    verdict = profile.verdict
    if verdict is None or len(verdict.by_round) < 2:
        return
    lasted = [round_verdict.seconds for round_verdict in verdict.by_round]
    kinds = [round_verdict.kind for round_verdict in verdict.by_round]
    above, below = strip(lasted, kinds, console.width - 12)
    shortest, longest = (pick(verdict.by_round, key=lambda round_verdict: round_verdict.seconds) for pick in (min, max))
    numbers = f"{verdict.by_round[0].round} to {verdict.by_round[-1].round}"
    ends = f"{seconds(shortest.seconds)} (round {shortest.round}) to {seconds(longest.seconds)} (round {longest.round})"
    if seconds(shortest.seconds) == seconds(longest.seconds):
        ends = f"{seconds(longest.seconds)} each"
    console.print(f"[bold]Rounds {numbers}[/bold]  {ends}")
    console.print(Text.assemble("  seconds   ", above), no_wrap=True)
    console.print(Text.assemble("  bound by  ", below), no_wrap=True)
    line = Text("            ")
    for kind in dict.fromkeys(sorted(kinds, key=kinds.count, reverse=True)):
        letter, colour = KINDS.get(kind, ("?", "default"))
        line.append(letter, f"black on {colour}")
        line.append(f" {kind} {percent(kinds.count(kind) / len(kinds))}  ")
    console.print(line)
    console.print()


def _waterfall(console: Any, profile: Profile, most: int | None) -> None:
    """Print one line per node along the time axis of one round, longest first, with the critical path marked."""
    time, path = profile.waterfall, profile.path
    if time is None or path is None:
        return
    text = path.text.removeprefix(f"round {time.round} ")
    console.print(f"[bold]Round {time.round}[/bold] {shown(text)}")
    nodes = sorted(time.nodes.values(), key=_order)
    on_path = {link.node for link in path.links}
    kept = nodes if most is None else _kept(nodes, on_path, most)
    names = max(4, min(14, max((len(node_time.node) for node_time in kept), default=0)))  # 4: «path»
    lasting = max(len(seconds(duration)) for duration in (time.seconds, *(node_time.busy for node_time in kept)))
    width = max(10, console.width - names - 5 - lasting)
    chain = [piece for link in path.links for piece in _pieces(link)]
    line = Text.assemble(f"  {'path':{names}} ", along(chain, time.began, time.seconds, width))
    console.print(Text.assemble(line, f"  {seconds(time.seconds)}"), no_wrap=True)
    for node_time in kept:
        intervals = [(i.part, i.began, i.seconds) for i in node_time.intervals]
        bar = along(intervals, time.began, time.seconds, width)
        mark = "▸" if node_time.node in on_path else " "
        name = "".join(c if c.isprintable() else "?" for c in node_time.node)[:names]
        console.print(
            Text.assemble((mark, "bold"), f" {name:{names}} ", bar, f"  {seconds(node_time.busy)}"), no_wrap=True
        )
    axis = f"0{seconds(time.seconds):>{width - 1}}"
    console.print(f"  {'':{names}} {axis}", style="dim", no_wrap=True)
    if len(kept) < len(nodes):
        console.print(f"  [dim]and {len(nodes) - len(kept)} more nodes: --all[/dim]")
    folded = any(i.folded for node_time in kept for i in node_time.intervals)
    note = "; parts of one client are sums, laid out one after the other" if folded else ""
    console.print(f"  [dim]▸ on the critical path; at the right: seconds busy{note}[/dim]")
    _waited(console, profile.waits)
    console.print()


def _waited(console: Any, waits: Mapping[str, str]) -> None:
    """Print who was waited for in the round that is shown."""
    by: dict[str, list[str]] = {}
    for node, whom in waits.items():
        by.setdefault(whom, []).append(node)
    descriptions = [
        f"{shown_node(those[0]) if len(those) == 1 else f'{len(those)} nodes'} for {shown_node(whom)}"
        for whom, those in sorted(by.items(), key=lambda item: -len(item[1]))
    ]
    if descriptions:
        more = f"; {len(descriptions) - MOST_WAITS} more" if len(descriptions) > MOST_WAITS else ""
        console.print(f"  [dim]waits: {'; '.join(descriptions[:MOST_WAITS])}{more}[/dim]")


def _pieces(link: PathLink) -> list[tuple[str, float, float]]:
    """Return a link's parts, one after the other."""
    pieces, at = [], link.began
    for part, lasted in link.parts.items():
        pieces.append((part, at, lasted))
        at += lasted
    return pieces or [(link.part, link.began, link.seconds)]


def _order(node_time: NodeTime) -> tuple[int, float, str]:
    return {"server": 0, "edge": 1}.get(node_time.kind, 2), -node_time.busy, node_time.node


def _kept(nodes: list[NodeTime], on_path: set[str], most: int) -> list[NodeTime]:
    """Return the server, the nodes on the path, then the longest; in their original order."""
    ranked = sorted(
        nodes, key=lambda node_time: (node_time.kind != "server", node_time.node not in on_path, -node_time.busy)
    )[:most]
    chosen = {node_time.node for node_time in ranked}
    return [node_time for node_time in nodes if node_time.node in chosen]


def _stragglers(console: Any, profile: Profile, rows: int | None) -> None:
    if all(len(time.clients) < 2 for time in profile.times):
        return  # a single client holds up nobody
    listed = profile.stragglers if rows is None else costly(profile.stragglers, profile.times)[:rows]
    if not listed:
        return
    console.print("[bold]Stragglers[/bold], who determined rounds and cost time")
    titles = ("", ">rounds", ">lost", ">typical", ">others", "by", "its seconds, over the rounds")
    table = new_table(*titles, padding=APART, no_wrap=True)
    for straggler in listed:
        table.add_row(
            shown_node(straggler.node),
            f"{straggler.determined} of {straggler.rounds}",
            seconds(straggler.seconds_lost),
            seconds(straggler.typical),
            seconds(straggler.peers),
            straggler.part,
            sparkline([turn.seconds for turn in straggler.history], 24),
        )
    console.print(table)
    left = len(profile.stragglers) - len(listed)
    if left:
        console.print(f"[dim]and {left} more: --all[/dim]")
    console.print()


def _remedies(console: Any, profile: Profile, rows: int | None) -> None:
    """Print remedies for what the run is bound by, best gain for the effort first."""
    if not profile.remedies:
        console.print(
            f"[bold]What would help[/bold]  nothing that keeps most of the data gains {percent(LEAST)} of a round.\n"
        )
        return
    console.print("[bold]What would help[/bold], computed from these times")
    table = new_table(padding=APART)
    table.add_column("", overflow="fold")
    table.add_column("a round", justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("what it costs", overflow="fold", style="dim")
    for remedy in profile.remedies[:rows]:
        gain = f"{'up to ' if remedy.at_most else ''}{percent(remedy.share)}"
        table.add_row(shown(remedy.name), seconds(remedy.after), gain, shown(remedy.costs))
    console.print(table)
    left = len(profile.remedies) - len(table.rows)
    if profile.run.host == "lab" and profile.clock == "virtual":
        console.print("[dim]The lab can run them, and tell what they cost in accuracy: --try[/dim]")
    console.print(f"[dim]and {left} more: --all[/dim]\n" if left else "")


def _what_if(console: Any, profile: Profile, rows: int | None) -> None:
    """Print the what-if table: mean seconds per round, as bars; best gain for the effort first."""
    better = [row for row in by_worth(profile.what_if) if row.share >= LEAST]
    if not better:
        return
    listed = better if rows is None else better[: rows + 2]
    longest = max(row.before for row in listed)
    names = min(max(len(row.name) for row in listed), console.width // 2)
    width = max(10, console.width - names - 14)
    console.print("[bold]What if[/bold]  mean seconds of a round")
    for name, lasted, colour in [("as it was", longest, GREY), *((row.name, row.after, RUNS[0]) for row in listed)]:
        bar = "█" * max(1, round(width * lasted / longest)) if longest > 0 else ""
        title = name if len(name) <= names else f"{name[: names - 1]}…"
        console.print(f"  {shown(title):{names}} {seconds(lasted):>8} [{colour}]{bar}[/]", no_wrap=True)
    if len(listed) < len(better):
        console.print(f"  [dim]and {len(better) - len(listed)} more: --all[/dim]")
    console.print()
