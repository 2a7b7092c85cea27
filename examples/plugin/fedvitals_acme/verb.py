# SPDX-License-Identifier: Apache-2.0
"""`fedvitals steps`: how many steps each client of a run trained."""

import sqlite3
from pathlib import Path

import click

SQL = """
SELECT node, SUM(value) AS steps FROM metrics JOIN runs ON runs.id = metrics.run
WHERE runs.name = ? AND metrics.name = 'steps' AND node IS NOT NULL GROUP BY node ORDER BY steps, node
"""  # views of docs/schema.md


@click.command()
@click.argument("run")
@click.option("--store", default="runs.db", show_default=True, type=click.Path(exists=True), help="The store to read.")
def command(run: str, store: str) -> None:
    """List how many steps each client of a run trained, the fewest first."""
    connection = sqlite3.connect(f"{Path(store).resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute(SQL, (run,)).fetchall()
    finally:
        connection.close()
    if not rows:
        raise click.ClickException(f"{store} has no steps of a run called '{run}'.")
    for node, steps in rows:
        click.echo(f"{node}  {steps:g}")
