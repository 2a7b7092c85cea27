# SPDX-License-Identifier: Apache-2.0
"""`fedvitals profile RUN`: where the time, the memory and the bytes of a run went, and what would make it quicker."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import click

from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import new_console

ROWS = 6  # of clients and remedies, unless --all
WIDEST = 200  # columns: beyond that, the eye loses the line


@click.command()
@click.option("--round", "number", type=int, help="Round whose waterfall to show. Default: the longest round.")
@click.option(
    "--clock",
    type=click.Choice(["real", "virtual"]),
    help="Clock to use. Default: the lab's virtual clock where the run has one.",
)
@click.option("--target", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Show which bandwidth each client would need for rounds of this length.")  # fmt: skip
@click.option("--try", "tries", type=click.IntRange(min=1), is_flag=False, flag_value=3, metavar="[N]",
              help="Lab runs: train with the first N (3) remedies, and show what each gains and costs.")  # fmt: skip
@click.option(
    "--devices", is_flag=True, help="Show on which devices the largest client would fit, and what would help."
)
@click.option("--all", "everything", is_flag=True, help="Show every client, layer and round, not only the first few.")
@run_options
def command(
    run: str | None,
    number: int | None,
    clock: str | None,
    target: float | None,
    tries: int | None,
    devices: bool,
    everything: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Show where a run's time, memory and bytes went.

    It says what limits the rounds, which clients slow them down, and what would help.

    RUN is a run's id, the beginning of one, or a name (its newest run); without it, the newest run of all.
    """
    from fedvitals.cli.profile import costs, times
    from fedvitals.cli.profile import lab as profile_lab
    from fedvitals.views.profile import as_data, plain, profile_of

    with opened_run(store, run) as (reader, chosen), _uncollected():
        profile = profile_of(reader, chosen, number, clock=clock, target_seconds=target)
    fitting = profile_lab.devices_for(profile) if devices else None
    tried = profile_lab.try_out(profile, tries) if tries is not None else None
    if as_json:
        rows_of_devices = None if fitting is None else fitting[1]
        asked = {
            name: plain(rows) for name, rows in (("tried", tried), ("devices", rows_of_devices)) if rows is not None
        }
        print_json("profile", as_data(profile) | asked)
        return
    console = new_console()
    if console.width > WIDEST:
        console = new_console(width=WIDEST)
    rows = None if everything else ROWS
    times.print_times(console, profile, rows)
    costs.print_costs(console, profile, rows)
    if fitting is not None:
        profile_lab.print_devices(console, *fitting)
    if tried is not None:
        profile_lab.print_tried(console, profile, tried)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection: records contain no cycles, and with many of them it is a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
