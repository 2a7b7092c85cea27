# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.kills [SHARE [KIND ...]]`: 1,000 kills, or a share of them, or of some kinds only.

Prints a table, and what was lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import click

from fedvitals_studies.flower.simulation import SuperLink
from fedvitals_studies.kills import study
from fedvitals_studies.kills.flower import kill_flower
from fedvitals_studies.kills.study import Kill
from fedvitals_studies.postgres_server import running_server

COUNTS = {"trainer": 610, "tape": 200, "readers": 80, "postgres": 60, "server": 30, "disk": 10, "flower": 10}
DISK_MEGABYTES = 220


def kills(share: float, kinds: Collection[str]) -> Iterator[Kill]:
    """Yield this share of the kills of these kinds, one after the other."""
    count = {kind: max(1, round(share * number)) if kind in kinds else 0 for kind, number in COUNTS.items()}
    for number in range(count["disk"]):
        with study.small_disk(DISK_MEGABYTES) as disk:
            yield study.fill_disk(number, disk)
    if count["server"] or count["postgres"]:
        with running_server() as server:
            yield from (study.kill_server(number, server) for number in range(count["server"]))
            yield from (study.kill_trainers_of_postgres(number, server) for number in range(count["postgres"]))
    own: dict[str, Callable[[int, Path], Kill]] = {
        "readers": study.kill_trainer_with_readers,
        "tape": study.kill_trainer_with_tape,
        "trainer": study.kill_trainer,
    }
    with tempfile.TemporaryDirectory() as name:
        yield from (kill(number, Path(name)) for kind, kill in own.items() for number in range(count[kind]))
    if count["flower"]:
        with tempfile.TemporaryDirectory() as name, SuperLink() as link:
            yield from (kill_flower(number, Path(name), link) for number in range(count["flower"]))


def main(share: float, kinds: Collection[str]) -> int:
    """Print the table. Returns 1 if anything acknowledged was lost."""
    rows: dict[str, list[Kill]] = {}
    for kill in kills(share, kinds):
        rows.setdefault(kill.kind, []).append(kill)
        click.echo(f"{kill.kind} {kill.seed}: {kill.acknowledged} rounds acknowledged", err=True)
        for text in kill.lost:
            click.echo(f"LOST: {kill.kind} {kill.seed}: {text}")
    click.echo("| killed | kills | rounds acknowledged | lost |\n| --- | ---: | ---: | ---: |")
    for kind, own in rows.items():
        click.echo(f"| {kind} | {len(own)} | {sum(k.acknowledged for k in own):,} | {sum(len(k.lost) for k in own)} |")
    return int(any(kill.lost for own in rows.values() for kill in own))


if __name__ == "__main__":
    share, *kinds = sys.argv[1:] or ["1"]
    sys.exit(main(float(share), kinds or [*COUNTS]))
