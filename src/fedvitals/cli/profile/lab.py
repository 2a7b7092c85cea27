# SPDX-License-Identifier: Apache-2.0
"""What `fedvitals profile` measures in the lab: remedies, and the devices on which a client fits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.bars import percent
from fedvitals.cli.screen import APART, new_table, seconds, shown, shown_node, size, with_unit
from fedvitals.diagnosis.memory_fit import DeviceFit, device_table
from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.views.machine import Memory
from fedvitals.views.profile import Profile

if TYPE_CHECKING:
    from fedvitals.lab.rerun import RemedyTrial

COSTLY = 0.05  # drop of accuracy: less may be chance, with one seed


def try_out(profile: Profile, most: int) -> list[RemedyTrial]:
    """Run the first remedies that the lab can run; those that keep the accuracy come first, by length of rounds."""
    run = profile.run
    if run.host != "lab":
        raise ConfigError(
            f"Only lab runs can be tried again: this one's host is {run.host}, and only that host can run it. "
            "What would help is computed from its times without --try."
        )
    if profile.clock != "virtual":
        raise ConfigError(
            "Remedies are tried on the lab's virtual clock, and these times are of the real one. "
            + ("Leave out --clock real." if "virtual" in profile.clocks else "Give the experiment a network.")
        )
    try:
        from fedvitals.lab.rerun import experiment_of, try_remedies
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "lab", "To try remedies out") from error
    measured_remedies = try_remedies(
        experiment_of(run),
        profile.remedies,
        most=most,
        report=lambda text: click.echo(f"running: {text} ...", err=True),
    )
    return sorted(measured_remedies, key=lambda tried: (costs(tried), tried.measured))


def costs(tried: RemedyTrial) -> bool:
    """Whether the accuracy dropped by more than chance explains."""
    return (tried.accuracy_cost or 0.0) > COSTLY


def devices_for(profile: Profile) -> tuple[Memory, list[DeviceFit]]:
    """Return the memory of the most demanding client, and its predicted peak on each of the lab's devices.

    Clients that trained as one batch were not measured separately: each trains again for one step by itself.
    """
    try:
        from fedvitals.lab.network.profiles import DEVICES
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "lab", "The list of devices") from error
    memory = profile.memory
    if (memory is None or not memory.shares) and "experiment" in profile.run.config:
        memory = _measured_again(profile)
    if memory is None or not memory.shares:
        raise ConfigError(
            f"Nothing is known of what the tensors of the clients of run {profile.run.id} take: no memory.tensors was "
            "measured. Monitor(profile=True) does, where clients train models of torch."
        )
    sizes = {name: float(device.memory_bytes) for name, device in DEVICES.items()}
    return memory, sorted(device_table(memory.shares, sizes, memory.batch), key=lambda row: -row.memory_bytes)


def _measured_again(profile: Profile) -> Memory | None:
    """Return the memory that the clients of a lab run take, from one step of each."""
    import msgspec

    from fedvitals import lab
    from fedvitals.lab.rerun import experiment_of
    from fedvitals.monitor.monitor import Monitor
    from fedvitals.store import open_reader
    from fedvitals.views.profile import profile_of

    experiment = experiment_of(profile.run)
    local = msgspec.structs.replace(experiment.local, iterations=1, epochs=None)
    once = msgspec.structs.replace(experiment, rounds=1, local=local, network=None)
    click.echo("running: one step of each client ...", err=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        with Monitor(store, detectors=(), machine=False) as monitor:
            lab.run(once, monitor, engine="sequential")
        with open_reader(store) as reader:
            return profile_of(reader, monitor.run.id).memory


def print_tried(console: Any, profile: Profile, tried: list[RemedyTrial]) -> None:
    console.print()
    if not tried:
        why = "none was computed" if not profile.remedies else f"of {len(profile.remedies)} remedies it can run none"
        console.print(f"[bold]Tried in the lab[/bold]  nothing: {why}.")
        return
    console.print(f"[bold]Tried in the lab[/bold]  a round took {seconds(tried[0].before)} before")
    table = new_table(padding=APART)
    table.add_column("", overflow="fold")
    for title in ("predicted", "measured", "gain"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("accuracy", no_wrap=True)
    for trial in tried:
        gain = percent(1 - trial.measured / trial.before) if trial.before > 0 else "–"
        accuracy = f"{_score(trial.accuracy_before)} → {_score(trial.accuracy_after)}"
        marked = f"[bold red]{accuracy} ![/bold red]" if costs(trial) else accuracy
        table.add_row(shown(trial.remedy.name), seconds(trial.predicted), seconds(trial.measured), gain, marked)
    console.print(table)
    if any(map(costs, tried)):
        console.print(
            f"[dim]! costs more than {percent(COSTLY)} of accuracy, after as many updates; these come last[/dim]"
        )


def _score(value: float | None) -> str:
    return "?" if value is None else with_unit(value, "share")


def print_devices(console: Any, memory: Memory, rows: list[DeviceFit]) -> None:
    batch = "" if memory.batch is None else f", batches of {memory.batch:.0f}"
    peak = size(rows[0].peak_bytes)
    console.print(f"\n[bold]Devices[/bold]  {shown_node(memory.node or '')} takes {peak} at its predicted peak{batch}")
    table = new_table(padding=APART)
    for title in ("", "it has", "", "" if all(row.fits for row in rows) else "what would fit"):
        right = title == "it has"
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=title == "it has")
    for row in rows:
        ways = [f"{remedy.text}: {size(remedy.bytes)}" for remedy in row.remedies]
        remedies_text = "\n".join(ways) or ("" if row.fits else "nothing that is known: a smaller model")
        verdict = "fits" if row.fits else "[bold]does not fit[/bold]"
        table.add_row(shown(row.device), size(row.memory_bytes), verdict, remedies_text)
    console.print(table)
