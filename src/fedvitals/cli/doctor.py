# SPDX-License-Identifier: Apache-2.0
"""`fedvitals doctor`: is this store undamaged, is this installation complete, and what can be repaired."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedvitals import __version__
from fedvitals.cli.options import json_option, print_json
from fedvitals.cli.screen import new_console, new_table, shown, size
from fedvitals.errors import FedvitalsError, StoreError

if TYPE_CHECKING:
    from fedvitals.store.upkeep.doctor import Sign

# The package by which each extra is recognised.
EXTRAS = {
    "torch": "torch",
    "kernel": "llvmlite",
    "lab": "sklearn",
    "replay": "blake3",
    "postgres": "psycopg",
    "otel": "opentelemetry",
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "flower": "flwr",
    "nvflare": "nvflare",
    "huggingface": "transformers",
    "lightning": "lightning",
    "system": "psutil",
    "parquet": "pyarrow",
    "plots": "matplotlib",
}
WAL_RESET_FIXED = (3, 51, 3)
FLOWER_OLDEST, FLOWER_TESTED = "1.21", "1.41"
COLOURS = {"fine": "green", "note": "yellow", "trouble": "red"}


@click.command()
@click.argument("store", required=False)
@click.option("--store", "named", metavar="FILE", help="The same as STORE.")
@click.option("--mend", is_flag=True, help="Repair what can be repaired. Nothing that can be read is deleted.")
@json_option
def command(store: str | None, named: str | None, mend: bool, as_json: bool) -> None:
    """Check this installation and a store for problems.

    The exit code is 1 if there is one.

    STORE is a file or postgresql://...; without it, the store is the default one, if there is one.
    """
    from fedvitals.store import store_target
    from fedvitals.store.upkeep.doctor import examine

    store = store or named
    where = store_target(store)
    here = environment()
    done: list[str] = []
    signs: list[Sign] = []
    if store is not None or isinstance(where, str) or where.exists():
        if isinstance(where, Path) and not where.exists():
            raise StoreError(f"There is no store '{where}'. Name another, or none to examine this installation alone.")
        if mend:
            done = _mend(where)
        signs = [*examine(where), *_spilled(store), *_tapes(where)]
    trouble = any(sign.state == "trouble" for sign in (*here, *signs))
    if as_json:
        print_json("doctor", {"environment": here, "store": signs, "mended": done, "trouble": trouble})
    else:
        _print(here, signs, done, mend=mend)
    if trouble:
        sys.exit(1)


def _mend(where: Path | str) -> list[str]:
    from fedvitals.store import open_store, spill_folder
    from fedvitals.store.upkeep.repair import mend
    from fedvitals.transport.spill import damaged_lines, leftover, readmit

    done = mend(where)
    folder = spill_folder(where)
    files = leftover(folder)
    if files and not any("Saved what could be read" in line for line in done):
        damaged = damaged_lines(folder)
        with open_store(where) as sink:
            readmit(folder, sink)
        left_out = f" {damaged} damaged lines could not be read, and were left out." if damaged else ""
        done.append(f"Took back what {len(files)} files in {folder} had kept for the store.{left_out}")
    return done


def _spilled(store: str | None) -> list[Sign]:
    from fedvitals.store import spill_folder
    from fedvitals.store.upkeep.doctor import Sign
    from fedvitals.transport.spill import damaged_lines, leftover

    folder = spill_folder(store)
    files, damaged = leftover(folder), damaged_lines(folder)
    if not files and not damaged:
        return [Sign("spilled", "fine", "nothing waits beside the store")]
    text = f"{len(files)} files in {folder} wait to be taken back: the next training does, or --mend"
    if damaged:
        return [Sign("spilled", "trouble", f"{text}. {damaged} of their lines are damaged, and will be left out")]
    return [Sign("spilled", "note", text)]


def _tapes(where: Path | str) -> list[Sign]:
    from fedvitals.store import open_reader
    from fedvitals.store.read import queries
    from fedvitals.store.tapes import lost_tapes, tapes
    from fedvitals.store.upkeep.doctor import Sign

    tape_sizes = tapes(where)
    if not tape_sizes:
        return [Sign("tapes", "fine", "none")]
    signs = [Sign("tapes", "fine", f"{len(tape_sizes)}, {size(sum(tape_sizes.values()))}"), *_tape_damage(where)]
    try:
        with open_reader(where) as reader:
            lost = lost_tapes(where, (run.id for run in queries.list_runs(reader)))
    except FedvitalsError:  # reported above
        return signs
    if lost:
        named = ", ".join([*lost][:3]) + (", ..." if len(lost) > 3 else "")
        text = f"{len(lost)} of runs that are not in the store, {size(sum(lost.values()))} ({named})"
        signs.append(Sign("tapes", "note", f"{text}: `fedvitals runs delete {next(iter(lost))}` removes such a tape"))
    return signs


def _tape_damage(where: Path | str) -> list[Sign]:
    from fedvitals.store.tapes import tape_folder, tapes
    from fedvitals.store.upkeep.doctor import Sign

    try:
        from fedvitals.replay.tape.inspection import problems_of
    except ImportError:  # without the extra «replay» no tape can be read here
        return []
    signs = []
    for run in tapes(where):
        try:
            problems = [*problems_of(tape_folder(where, run))]
        except (OSError, FedvitalsError) as error:
            problems = [str(error)]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            signs.append(Sign("tapes", "trouble", f"{run}: {problems[0]}{more}"))
    return signs


def environment() -> list[Sign]:
    """Return the signs of the environment that fedvitals runs in."""
    from fedvitals.store.upkeep.doctor import Sign

    signs = [Sign("fedvitals", "fine", f"{__version__}, Python {platform.python_version()}, numpy {_version('numpy')}")]
    torch = importlib.util.find_spec("torch") is not None
    if torch:
        from fedvitals.kernels import backend, device_backend

        signs.append(Sign("torch", "fine", _version("torch")))
        kernel = backend()
        signs.append(Sign("kernel", "fine" if kernel.name == "llvm" else "note", str(kernel)))
        on_gpu = device_backend()
        if on_gpu is not None:
            signs.append(Sign("kernel on GPU", "fine" if on_gpu.name == "triton" else "note", str(on_gpu)))
        else:
            from fedvitals.lab.engines.devices import why_no_cuda

            signs.append(Sign("GPU", "fine", f"none: {why_no_cuda()}"))
    signs.append(_sqlite())
    if importlib.util.find_spec("flwr") is not None:
        signs.append(_flower())
    missing = [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is None]
    there = [extra for extra in EXTRAS if extra not in missing]
    signs.append(Sign("extras", "fine", f"installed: {', '.join(there) or 'none'}"))
    if missing:
        line = f"pip install 'fedvitals[{missing[0]}]'"
        signs.append(Sign("extras", "fine", f"not installed: {', '.join(missing)}; for example  {line}"))
    return signs


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sqlite() -> Sign:
    from fedvitals.store.upkeep.doctor import Sign

    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info >= WAL_RESET_FIXED:
        return Sign("sqlite", "fine", version)
    text = (
        f"{version}; before 3.51.3 a file can be damaged when two connections write or fold in the log at the same "
        "moment. fedvitals writes through one, so this concerns only other programs that write to the same file"
    )
    return Sign("sqlite", "note", text)


def _flower() -> Sign:
    from fedvitals.store.upkeep.doctor import Sign

    version = _version("flwr")
    ray = "" if importlib.util.find_spec("ray") is None else f", ray {_version('ray')} for simulations"
    installed, oldest, tested = (
        tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
        for text in (version, FLOWER_OLDEST, FLOWER_TESTED)
    )
    if installed < oldest:
        return Sign("flower", "note", f"{version} is too old: fedvitals attaches to {FLOWER_OLDEST} and newer")
    newer = f"; newer than what fedvitals was tested with, {FLOWER_TESTED}" if installed > tested else ""
    return Sign("flower", "fine", f"{version}{ray}{newer}")


def _print(here: list[Sign], signs: list[Sign], done: list[str], *, mend: bool) -> None:
    console = new_console()
    for title, group in (("This installation", here), ("The store", signs)):
        if not group:
            continue
        table = new_table(show_header=False, title=title, title_justify="left")
        for sign in group:
            table.add_row(sign.what, f"[{COLOURS[sign.state]}]{sign.state}[/]", shown(sign.text))
        console.print(table, "")
    for line in done:
        console.print(f"Mended: {shown(line)}", soft_wrap=True)
    if mend and not done:
        console.print("There was nothing to mend.")
    if not signs:
        console.print("No store here; name one to have it examined:  fedvitals doctor runs.db")
    elif not mend and any(sign.state == "trouble" for sign in signs):
        console.print("`fedvitals doctor STORE --mend` repairs what can be repaired.")
