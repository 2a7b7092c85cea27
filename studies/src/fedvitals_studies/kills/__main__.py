# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.kills [SHARE]`: 1,000 kills, or a share of them; prints a table, and what was lost."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from fedvitals_studies.flower.simulation import SuperLink
from fedvitals_studies.kills import study
from fedvitals_studies.kills.flower import kill_flower
from fedvitals_studies.kills.study import Kill
from fedvitals_studies.postgres_server import PostgresServer

COUNTS = {"trainer": 610, "tape": 200, "readers": 80, "postgres": 60, "server": 30, "disk": 10, "flower": 10}
DISK_MEGABYTES = 220


def kills(share: float) -> Iterator[Kill]:
    """Yield so great a share of the kills of each kind, one after the other."""
    count = {kind: max(1, round(share * number)) for kind, number in COUNTS.items()}
    for number in range(count["disk"]):
        with study.small_disk(DISK_MEGABYTES) as disk:
            yield study.fill_disk(number, disk)
    with tempfile.TemporaryDirectory(prefix="fv-pg-") as name:
        server = PostgresServer(Path(name))
        server.start()
        try:
            yield from (study.kill_server(number, server) for number in range(count["server"]))
            yield from (study.kill_trainers_of_postgres(number, server) for number in range(count["postgres"]))
        finally:
            server.stop()
    own: dict[str, Callable[[int, Path], Kill]] = {
        "readers": study.kill_trainer_with_readers,
        "tape": study.kill_trainer_with_tape,
        "trainer": study.kill_trainer,
    }
    with tempfile.TemporaryDirectory() as name:
        yield from (kill(number, Path(name)) for kind, kill in own.items() for number in range(count[kind]))
        with SuperLink() as link:
            yield from (kill_flower(number, Path(name), link) for number in range(count["flower"]))


def main(share: float) -> int:
    """Print the table; returns 1 if anything acknowledged was lost."""
    rows: dict[str, list[Kill]] = {}
    for kill in kills(share):
        rows.setdefault(kill.kind, []).append(kill)
        click.echo(f"{kill.kind} {kill.seed}: {kill.acknowledged} rounds acknowledged", err=True)
        for text in kill.lost:
            click.echo(f"LOST: {kill.kind} {kill.seed}: {text}")
    click.echo("| killed | kills | rounds acknowledged | lost |\n| --- | ---: | ---: | ---: |")
    for kind, own in rows.items():
        click.echo(f"| {kind} | {len(own)} | {sum(k.acknowledged for k in own):,} | {sum(len(k.lost) for k in own)} |")
    return int(any(kill.lost for own in rows.values() for kill in own))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0))
