# SPDX-License-Identifier: Apache-2.0
"""`fedvitals bench`: the figures of the README, measured here and now."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from fedvitals.cli.options import json_option, print_json

PARTS = (
    "kernel",
    "overhead",
    "gsc",
    "store",
    "wire",
    "start",
    "diagnosis",
    "profile",
    "lab",
    "scale",
    "flower",
    "replay",
    "gpu",
    "soak",
    "ui",
)
FOLDERS = ("flower", "gpu", "lab", "profile", "replay", "ui")  # several modules each; `bars` measures them all
LONG = tuple(part for part in PARTS if part not in ("kernel", "store", "wire", "start"))  # these report their progress
BARS = {
    "overhead": ("steps", "rounds", "data", "gsc", "llm", "others"),
    "lab": ("cnn", "mlp", "start", "memory", "study"),
    "scale": ("throughput", "growth"),
    "flower": ("lines", "cnn", "large", "faults"),
    "replay": ("verified", "machines", "recording", "size", "jump", "bisect"),
    "gpu": ("round", "statistics", "kernel", "clients", "monitored", "llm", "precision", "study"),
}
SHOWN = {  # the rest is for --json
    "wire": (
        *("client_round", "records", "bytes", "encode_microseconds", "decode_microseconds", "both_microseconds"),
        "bar_microseconds",
    ),
    "lab": ("what", "against", "bar", "value", "low", "high", "verdict"),
    "scale": ("what", "bar", "measured", "verdict"),
    "profile": ("what", "bar", "measured", "verdict"),
    "flower": ("what", "bar", "measured", "verdict"),
    "replay": ("what", "bar", "measured", "verdict"),
    "gpu": ("what", "bar", "measured", "verdict"),
    "ui": ("what", "bar", "measured", "verdict"),
    "overhead": (
        *("what", "model", "by", "pairs", "overhead_percent", "low", "high", "quiet_percent", "bar_percent", "verdict"),
        "cheaper_than_naive",
    ),
    "diagnosis": ("after_rounds", "milliseconds", "largest", "bar_milliseconds", "verdict", "percent_of_paper_round"),
}


@click.command()
@click.argument("part", type=click.Choice(PARTS), required=False)
@click.option("--quick", is_flag=True, help="Fewer repeats and smaller sizes: a smoke test, not a figure to quote.")
@click.option("--full", is_flag=True, help="lab: the paper's 100 clients against each peer, instead of 20.")
@click.option("--peers", is_flag=True, help="lab: install the peers that are missing, each in its own environment.")
@click.option(
    "--environments",
    type=click.Path(file_okay=False, path_type=Path),
    help="lab: where the peers' environments are, or are made. Default: ~/.cache/fedvitals-bench.",
)
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="lab: the folder that holds GTSRB."
)
@click.option(
    "--only",
    type=click.Choice([*dict.fromkeys(bar for bars in BARS.values() for bar in bars)]),
    multiple=True,
    help="overhead, lab, scale, flower, replay, gpu: some of its bars.",
)
@click.option(
    "--stores", type=click.Path(file_okay=False, path_type=Path), help="flower: a folder to keep the runs' stores in."
)
@json_option
def command(part: str | None, quick: bool, as_json: bool, **more: Any) -> None:
    """Measure what fedvitals costs on this machine.

    All parts are measured, or one of them. Everything is compared in one run, in turns, and reported as a ratio with
    its interval.
    """
    given = _options_by_part(part, {name: value for name, value in more.items() if value})
    results: dict[str, list[dict[str, Any]]] = {}
    for name in [part] if part else _here():
        click.echo(f"bench {name} ...", err=True)
        results[name] = _measure(name, quick, given.get(name, {}))
        if not as_json:
            _print(name, results[name])
    if as_json:
        print_json("bench", results)


def _here() -> list[str]:
    """Return all parts; the GPU's if there is one."""
    import torch

    return [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]


def _options_by_part(part: str | None, more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options for each part that has some."""
    given: dict[str, dict[str, Any]] = {}
    for name, value in more.items():
        owners = [*BARS] if name == "only" else ["flower" if name == "stores" else "lab"]
        taken = [owner for owner in owners if part in (None, owner)]
        if not taken:
            raise click.UsageError(f"--{name} belongs to `fedvitals bench {owners[0]}`, not to `bench {part}`.")
        for owner in taken:
            given.setdefault(owner, {})[name] = value
    for owner, options in given.items():
        strange = [bar for bar in options.get("only", ()) if bar not in BARS[owner]]
        if strange:
            raise click.UsageError(f"`bench {owner}` has no bar '{strange[0]}'. It has {', '.join(BARS[owner])}.")
    return given


def _measure(part: str, quick: bool, more: dict[str, Any]) -> list[dict[str, Any]]:
    def tell(text: str) -> None:
        click.echo(f"  {text}", err=True)

    module = f"{part}.bars" if part in FOLDERS else part
    measure = getattr(importlib.import_module(f"fedvitals_studies.bench.{module}"), f"bench_{part}")
    rows: list[dict[str, Any]] = measure(quick=quick, tell=tell, **more) if part in LONG else measure(quick=quick)
    return rows


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedvitals.cli.screen import number

    columns = list(SHOWN.get(part) or dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, pad_edge=False, title=part, title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
    for row in rows:
        cells = [row.get(column) for column in columns]
        table.add_row(*("" if c is None else number(c) if isinstance(c, int | float) else str(c) for c in cells))
    screen = Console()
    screen.print(table, "")
    for row in rows:
        if row.get("note"):
            screen.print(f"{row['what']}, {row['against']}: {row['note']}.", style="dim", markup=False, highlight=False)
