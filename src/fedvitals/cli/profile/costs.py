# SPDX-License-Identifier: Apache-2.0
"""The lower half of `fedvitals profile`: throughput, memory, machines, traffic, and the cost of learning."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from fedvitals.analysis.traffic import ClientTraffic, Flow, Traffic
from fedvitals.cli.bars import RUNS, in_lines, percent, shares_of
from fedvitals.cli.screen import APART, new_table, number, seconds, shown, shown_node, size, with_unit
from fedvitals.plural import counted
from fedvitals.views.machine import ROOM, Memory
from fedvitals.views.profile import Profile

OUTCOMES = {"answered": "█", "late": "l", "lost": "x", "failed": "f", "away": "-"}
MEMORY = {
    "memory.peak": "process, peak",
    "memory.resident": "process, at the end",
    "memory.growth": "grew in a round",
    "memory.kept": "heap kept in a round",
    "memory.cuda_allocated": "GPU, tensors",
    "memory.cuda_reserved": "GPU, reserved",
    "memory.tensors": "a step's tensors",
    "memory.limit": "there is",
}
TENSORS = dict(zip(("model", "buffers", "gradients", "optimizer", "activations", "telemetry"), RUNS, strict=False))
GROWS = ("memory.resident", "memory.cuda_allocated", "memory.cuda_reserved")
WIDTH = 24  # cells of a history


def print_costs(console: Any, profile: Profile, rows: int | None) -> None:
    _throughput(console, profile, rows)
    _memory(console, profile, rows)
    _machine(console, profile)
    _operators(console, profile, rows)
    _traffic(console, profile.traffic, rows)
    _needed(console, profile, rows)
    _reached(console, profile)


def _throughput(console: Any, profile: Profile, rows: int | None) -> None:
    clients = profile.throughput
    if not clients:
        return
    middle = clients[len(clients) // 2]
    # Machines and training speed are on the real clock, whatever clock the rest of the report is on.
    whose = " [dim](of this machine, real clock)[/dim]" if profile.clock == "virtual" else ""
    paces = [number(client.samples_per_second) for client in (clients[0], clients[-1])]
    span = f" at the median client, {paces[0]} to {paces[1]}" if len(clients) > 1 else f", {shown_node(middle.node)}"
    console.print(f"[bold]Throughput[/bold]  {number(middle.samples_per_second)} samples/s{span}{whose}")
    for client in clients[: 3 if rows else None] if len(clients) > 1 or middle.epoch_seconds is not None else ():
        epoch = "" if client.epoch_seconds is None else f", {seconds(client.epoch_seconds)} an epoch"
        console.print(f"  {shown_node(client.node)}  {number(client.samples_per_second)} samples/s{epoch}")
    console.print()


def _grown(console: Any, memory: Memory, rows: int | None) -> None:
    """Print for which clients the process grew most, and whose training kept most; a single one is shown above."""
    if len(memory.grown) > 1:
        most_grown = [growth for growth in memory.grown if growth.bytes > 0][: 3 if rows else None]
        for title, growth in zip(["grew most with", *[""] * len(most_grown)], most_grown, strict=False):
            most = f"{size(growth.most_bytes)} of it in round {growth.most_round}"
            where = f"{shown_node(growth.node)}, over {growth.rounds} rounds; {most}"
            console.print(f"  {title:20} {size(growth.bytes):>9}  [dim]{where}[/dim]")
    if len(memory.kept) > 1 and memory.kept[0].bytes > 0:
        first, second, *_ = memory.kept
        rest = f"a round on average; the next is {shown_node(second.node)} with {size(second.bytes / second.rounds)}"
        each = f"{size(first.bytes / first.rounds):>9}  [dim]{shown_node(first.node)}, {rest}[/dim]"
        console.print(f"  {'heap kept most by':20} {each}")


def _memory(console: Any, profile: Profile, rows: int | None) -> None:
    memory = profile.memory
    if memory is None:
        return
    console.print("[bold]Memory[/bold]")
    order = {metric: place for place, metric in enumerate(MEMORY)}
    for peak in sorted(memory.peaks, key=lambda reading: order.get(reading.metric, len(order))):
        whose = f" ({shown_node(peak.growth_node)})" if peak.growth_node and peak.growth_node != peak.node else ""
        grew = f", grew by {size(peak.growth_bytes)} over the run{whose}"
        grew = grew if peak.metric in GROWS and peak.growth_bytes > 0 else ""
        where = f"{shown_node(peak.node)}, " if peak.node else ""
        name = MEMORY.get(peak.metric, shown(peak.metric))
        console.print(f"  {name:20} {size(peak.bytes):>9}  [dim]{where}round {peak.round}{grew}[/dim]")
    _grown(console, memory, rows)
    if memory.shares:
        bar, items = Text(f"  tensors of {plain(memory.node or '')}  "), []
        for share, cells in shares_of(memory.shares, max(10, console.width - 20 - len(memory.node or ""))).items():
            letter, style = share[0].upper(), f"black on {TENSORS[share]}"
            bar.append(letter * cells, style)
            items.append(Text.assemble((letter, style), f" {share} {size(memory.shares[share])}"))
        console.print(bar, no_wrap=True)
        for line in in_lines("  ", items, console.width):
            console.print(line)
        console.print("  [dim]On which devices that would fit: --devices[/dim]")
    console.print()


def _machine(console: Any, profile: Profile) -> None:
    if not profile.machine:
        return
    console.print("[bold]Machines[/bold]")
    for reading in profile.machine:
        extreme = "at least" if reading.metric in ROOM else "at most"
        mean, most = (with_unit(value, reading.unit) for value in (reading.mean, reading.extreme))
        where = f"{shown_node(reading.node)}, round {reading.round}" if reading.node else f"round {reading.round}"
        name = shown(reading.metric.removeprefix("machine.").replace("_", " ").replace(".", " "))
        console.print(f"  {name:20} {mean} on average, {extreme} {most}  [dim]{where}[/dim]")
    console.print()


def _operators(console: Any, profile: Profile, rows: int | None) -> None:
    if not profile.operators:
        return
    newest = profile.operators[-1]
    operators = newest.data.get("operators")
    listed = [row for row in operators if isinstance(row, dict)] if isinstance(operators, list) else []
    console.print(f"[bold]Operators[/bold]  {shown_node(str(newest.node))}, round {newest.round}, by their own time")
    for row in listed[:rows]:
        took = sum(v for name in ("seconds", "device_seconds") if isinstance(v := row.get(name), int | float))
        taken = row.get("bytes")
        memory = size(float(taken)) if isinstance(taken, int | float) else ""
        console.print(f"  {seconds(took):>9}  {memory:>9}  {row.get('calls', ''):>6} ×  {shown(str(row.get('name')))}")
    console.print()


def _traffic(console: Any, traffic: Traffic, rows: int | None) -> None:
    moved = traffic.bytes
    if not moved and not traffic.telemetry_bytes and not traffic.clients:
        return
    untold = "no models and updates were recorded: Monitor.transfer() records them"
    console.print(f"[bold]Traffic[/bold]  {f'{size(moved)} in all' if moved else untold}", soft_wrap=not moved)
    for title, flow in (("up", traffic.up), ("down", traffic.down), ("between servers", traffic.between)):
        if flow.bytes:
            console.print(f"  {title:20} {size(flow.bytes):>9}  [dim]{_flow(flow)}[/dim]")
    if traffic.telemetry_bytes:
        share = f"not in these, {percent(traffic.telemetry_share or 0.0)} of all" if moved else "fedvitals' own"
        console.print(f"  {'telemetry':20} {size(traffic.telemetry_bytes):>9}  [dim]{share}[/dim]")
    if traffic.retries:
        console.print(f"  {'sent again':20} {traffic.retries:>9}  [dim]the same message twice in a round[/dim]")
    if traffic.layers and moved:
        layers = [f"{plain(own.layer)} {percent(own.share)}" for own in traffic.layers[: 4 if rows else None]]
        more = [f"{len(traffic.layers) - len(layers)} more"] if len(layers) < len(traffic.layers) else []
        packed = ["(after compression in proportion)"] if (traffic.up.compression or 1) != 1 else []
        for line in in_lines(f"  {'by layer':20} ", [*layers, *more, *packed], console.width):
            console.print(line)
    _failures(console, traffic, rows)
    console.print()


def _failures(console: Any, traffic: Traffic, rows: int | None) -> None:
    """Print which clients were away, late, lost or failed, over their rounds; the worst first."""
    ill = sorted((client for client in traffic.clients if _ailing(client)), key=lambda client: -_ailing(client))
    if not ill:
        if traffic.clients:
            console.print("  No update was late or lost, no client failed or was away.")
        return
    console.print()
    console.print("[bold]Who was away, late, lost or failed[/bold]")
    titles = ("", ">asked", ">available", ">failures", ">late", ">lost", ">failed", "over its rounds")
    table = new_table(*titles, padding=APART, no_wrap=True)
    for client in ill[:rows]:
        counts = [number(client.count(outcome)) for outcome in ("late", "lost", "failed")]
        shares = ["–" if share is None else percent(share) for share in (client.availability, client.failure_rate)]
        table.add_row(shown_node(client.node), number(client.asked), *shares, *counts, _history(client))
    console.print(table)
    more = "" if rows is None or len(ill) <= rows else f"; {len(ill) - rows} more: --all"
    console.print(f"[dim]█ answered, l late, x lost, f failed, - away{more}[/dim]")


def _flow(flow: Flow) -> str:
    words = []
    if flow.compression is not None and flow.compression != 1:
        words.append(f"{size(flow.raw_bytes)} before compression, {number(flow.compression)} : 1")
    if flow.bits_per_second is not None:
        words.append(f"{rate(flow.bits_per_second)} while it went")
    return ", ".join([f"{number(flow.messages)} messages", *words])


def plain(text: str) -> str:
    """Return text from a record for output without markup: no control character may move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def rate(bits_per_second: float) -> str:
    """Return a rate in bits per second, as links are sold."""
    return size(bits_per_second).replace("B", "bit") + "/s"


def _ailing(client: ClientTraffic) -> int:
    return client.asked - client.count("answered")


def _history(client: ClientTraffic) -> str:
    """Return a client's outcomes over its rounds; with many, each cell shows the worst of its rounds."""
    outcomes = [*client.outcomes.values()]
    order = [*reversed(OUTCOMES)]
    count = min(WIDTH, len(outcomes))
    cells = [outcomes[i * len(outcomes) // count : (i + 1) * len(outcomes) // count] for i in range(count)]
    return "".join(OUTCOMES[min(cell, key=order.index)] for cell in cells)


def _needed(console: Any, profile: Profile, rows: int | None) -> None:
    short = [link for link in profile.needed if _short(link.bits_per_second, link.now_bits_per_second)]
    if not profile.needed:
        if profile.target_seconds is not None:
            console.print(f"[bold]Bandwidth[/bold]  {profile.needed_why}\n", soft_wrap=True)
        return
    target = seconds(profile.needed[0].target_seconds)
    if not short:
        console.print(f"[bold]Bandwidth[/bold]  enough at every client for rounds of {target}.\n")
        return
    lacking = f"{counted(len(short), 'client')} {'has' if len(short) == 1 else 'have'} too little"
    console.print(f"[bold]Bandwidth for rounds of {target}[/bold]  {lacking} (--target SECONDS)")
    for link in short[:rows]:
        has = "?" if link.now_bits_per_second is None else rate(link.now_bits_per_second)
        late = f", latency {seconds(link.latency_seconds)}" if link.latency_seconds else ""
        needs = f"none is enough: the rest takes {seconds(link.other_seconds)}{late} already"
        if link.bits_per_second is not None:
            needs = f"needs {rate(link.bits_per_second)}"
        console.print(f"  {shown_node(link.node):8} has {has}, {needs}")
    if rows is not None and len(short) > rows:
        console.print(f"  [dim]and {len(short) - rows} more: --all[/dim]")
    console.print()


def _short(needs: float | None, has: float | None) -> bool:
    return needs is None or (has is not None and needs > has * 1.001)


def _reached(console: Any, profile: Profile) -> None:
    if not profile.reached:
        return
    best = profile.reached[0].best
    table = new_table("To reach", ">rounds", ">seconds", ">virtual", ">bytes", padding=APART, no_wrap=True)
    missed = []
    for target in profile.reached:
        if target.round is None:
            missed.append(percent(target.accuracy))
        else:
            spent = (seconds(target.seconds), seconds(target.virtual_seconds), size(target.bytes))
            table.add_row(percent(target.accuracy), number(target.rounds), *spent)
    if table.rows:
        console.print(table)
    if missed:
        best_text = "nothing finite" if best is None else with_unit(best, "share")
        console.print(f"[bold]{', '.join(missed)}[/bold] accuracy not reached: best {best_text}")
