# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.soak [MINUTES] [--json]`: print the table; exits with 1 if a bar is missed."""

from __future__ import annotations

import dataclasses
import signal
import sys

import click

from fedvitals.cli.options import json_option, print_json
from fedvitals_studies.soak.study import rows, soak


@click.command(epilog="Exit code: 1 if a bar is missed; 2 for wrong use.")
@click.argument("minutes", type=click.FloatRange(0, min_open=True), default=30.0)
@json_option
def main(minutes: float, as_json: bool) -> None:
    """Train for MINUTES (30) with the dashboard open, and tell what both processes take of the machine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes end, too
    measured = soak(minutes, lambda text: click.echo(text, err=True))
    table = rows(measured)
    if as_json:
        print_json("soak", {"rows": table, **dataclasses.asdict(measured)})
    else:
        click.echo("| what, over the last two thirds | bar | measured | verdict |\n| --- | --- | --- | --- |")
        for row in table:
            click.echo(f"| {row['what']} | {row['bar']} | {row['measured']} | {row['verdict']} |")
    sys.exit(int(any(row["verdict"] == "missed" for row in table)))


if __name__ == "__main__":
    main()
