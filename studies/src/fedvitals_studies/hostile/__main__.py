# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.hostile [SHARE] [payloads|runs]`: 1,000,000 hostile payloads and 216 hostile runs.

SHARE: so great a share of both. Prints tables, and what must not have happened.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import click

from fedvitals_studies.hostile.federation import (
    HOSTILE,
    ILLNESSES,
    changed_verdicts,
    federate,
    findings_about_hostile,
    largest_move,
)
from fedvitals_studies.hostile.hosts import FlowerHost, OtlpHost, PlainHost
from fedvitals_studies.hostile.payloads import AttackCounts, attack_host
from fedvitals_studies.hostile.telemetry import ATTACKS

HOSTS = ((PlainHost, 920_000, False), (PlainHost, 20_000, True), (FlowerHost, 50_000, False), (OtlpHost, 10_000, False))
TWINS, ROUNDS, PRIVACY = 18, 6, (2, 3)


@dataclass(slots=True)
class AttackSummary:
    """The results of the runs with one kind of attack."""

    runs: int = 0
    changed: list[str] = field(default_factory=list)
    moved: float = 0.0
    named_by_refusal: int = 0  # runs in which the hostile client was named because telemetry was refused
    named_by_finding: int = 0  # runs in which it was only named by another finding
    findings: Counter[str] = field(default_factory=Counter)


def counts_of_hosts(share: float) -> Iterator[AttackCounts]:
    """Attack the hosts one after the other."""
    for seed, (host_of, count, strangers) in enumerate(HOSTS):
        with host_of() as host:
            yield attack_host(host, max(1, round(share * count)), seed, strangers=strangers)


def hostile_runs(share: float) -> dict[str, AttackSummary]:
    """Train honest runs, and each of them once more with every kind of attack; returns a row for each kind."""
    rows = {kind: AttackSummary() for kind in ATTACKS}
    cases = itertools.cycle(itertools.product(ILLNESSES, PRIVACY))
    for seed, (illness, privacy) in zip(range(max(1, round(share * TWINS))), cases, strict=False):
        honest = federate(seed, illness=illness, rounds=ROUNDS, privacy=privacy)
        for kind, row in rows.items():
            hostile = federate(seed, kind, illness=illness, rounds=ROUNDS, privacy=privacy)
            case = f"{kind}, seed {seed}, {illness}, privacy {privacy}"
            row.runs += 1
            row.changed += [f"{case}: {verdict}" for verdict in changed_verdicts(honest, hostile)]
            row.changed += [f"{case}: {error}" for error in hostile.errors]
            row.changed += [f"{case}: {hostile.rounds} rounds"] if hostile.rounds != ROUNDS else []
            row.moved = max(row.moved, largest_move(honest, hostile))
            issues = findings_about_hostile(honest, hostile)
            row.changed += [f"{case}: telemetry of {node} refused" for node in hostile.refused - {HOSTILE}]
            row.named_by_refusal += HOSTILE in hostile.refused
            row.named_by_finding += bool(issues and HOSTILE not in hostile.refused)
            row.findings.update(issues)
            click.echo(f"{case}: {sorted(issues) or 'not named'}", err=True)
    return rows


def tell_payloads(share: float) -> list[str]:
    """Print the table of payloads. Returns what must not have happened."""
    failures: list[str] = []
    rows = []
    for counts in counts_of_hosts(share):
        failures += [f"{counts.host}: {failure}" for failure in counts.failures]
        memory = " → ".join(f"{size / 1e6:.0f}" for size in counts.resident)
        rows.append(
            f"| {counts.host} | {counts.count:,} ({counts.unread:,}) | {counts.senders:,} | {counts.rounds:,} | "
            f"{len(counts.crashes)}; {len(counts.errors)} | {counts.longest:.2f} ({counts.longest_processor:.2f}) s | "
            f"{counts.refusals:,} | {counts.honest_refused}; {counts.honest_missing} | {memory} MB |"
        )
        click.echo(f"{rows[-1]} {dict(counts.payloads)}", err=True)
    click.echo(
        "| host | hostile payloads (not read) | hostile senders | rounds | raised; errors of the monitor | longest "
        "call (processor) | refused | of honest clients: refused; missing | resident memory at each quarter |"
    )
    click.echo("| --- |" + " ---: |" * 8)
    click.echo("\n".join(rows))
    return failures


def tell_runs(share: float) -> list[str]:
    """Print the table of runs. Returns what must not have happened."""
    rows = hostile_runs(share)
    click.echo("| attack | runs | verdicts on others changed | largest move | named: refused; found | findings |")
    click.echo("| --- |" + " ---: |" * 4 + " --- |")
    for kind, row in rows.items():
        issues = ", ".join(f"{issue} {count}" for issue, count in row.findings.most_common())
        named = f"{row.named_by_refusal}; {row.named_by_finding}"
        click.echo(f"| {kind} | {row.runs} | {len(row.changed)} | {row.moved:.3f} | {named} | {issues} |")
    runs = sum(row.runs for row in rows.values())
    named_runs = sum(row.named_by_refusal + row.named_by_finding for row in rows.values())
    click.echo(f"\n{runs} hostile runs, the hostile client named in {named_runs} ({named_runs / runs:.1%}).")
    return [change for row in rows.values() for change in row.changed]


def main(share: float = 1.0, part: str = "") -> int:
    """Print the tables. Returns 1 if anything happened that must not."""
    logging.getLogger("fedvitals").setLevel(logging.CRITICAL)  # each refusal is also a warning
    failures = [] if part == "runs" else tell_payloads(share)
    failures += [] if part == "payloads" else tell_runs(share)
    for failure in failures:
        click.echo(f"FAILED: {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, *sys.argv[2:3]))
