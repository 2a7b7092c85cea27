# SPDX-License-Identifier: Apache-2.0
"""`fedvitals report RUN`: the whole story of a run in one file; of several runs, their comparison."""

from __future__ import annotations

import click

from fedvitals.cli.options import newest_run_stated, print_json, store_options


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN ...]")
@click.option(
    "-o", "--output", metavar="FILE", help="File to write: .html, .pdf or .md. Default: RUN-report.html in this folder."
)
@click.option("--force", is_flag=True, help="Overwrite a file even if it is not a report of fedvitals.")
@store_options
def command(runs: tuple[str, ...], output: str | None, force: bool, store: str | None, as_json: bool) -> None:
    """Write a run's report as HTML, PDF or Markdown.

    It has what happened, the evidence, what to do, and an appendix on clients, layers, time, configuration and what was
    not measured. For several runs, it is the comparison.

    RUN is a run's id, the beginning of one, or a name (its newest run); without it, the newest run of all. HTML is one
    file that needs nothing else; PDF is printed by Chromium; Markdown has its pictures beside it, in FILE_files.
    """
    from pathlib import Path

    from fedvitals.report.write import report
    from fedvitals.store import open_reader
    from fedvitals.views.units import size

    with open_reader(store) as reader:
        chosen = runs or (newest_run_stated(reader),)
        written = report(reader, chosen, None if output is None else Path(output), force=force)
    if as_json:
        print_json("report", written)
        return
    beside = f" and {len(written.pictures)} pictures beside it" if written.pictures else ""
    click.echo(f"{written.file}  {size(written.bytes)}{beside}")
    for verdict in written.verdicts:
        click.echo("".join(c if c.isprintable() else "?" for c in verdict.sentence))
