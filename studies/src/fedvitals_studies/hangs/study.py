# SPDX-License-Identifier: Apache-2.0
"""Runs planted hangs and judges what the store reports while they last.

A hang is named in time if the finding exists before the round has taken twice the usual time, with the right client
awaited (none, if the server itself hangs) in the right phase; and if it is over once the hang is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedvitals.errors import FedvitalsError
from fedvitals.records import Event
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from fedvitals_studies.hangs.plant import HUNG_ROUND, OF_SERVER, Plant

MODULES = {"loop": "loops", "processes": "loops", "flower": "flower_app", "nvflare": "nvflare_job"}
PATIENCE = 240.0  # seconds


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one hang. Seconds: of the round when it was reported, and of a usual one."""

    host: str
    kind: str
    named: bool
    in_time: bool
    over: bool
    awaited: tuple[str, ...] = ()
    phase: str = ""
    seconds: float = 0.0
    usual: float = 0.0
    stacks: int = 0  # attached stacks of threads
    client_stacks: int = 0  # those of clients in other processes
    false: int = 0  # findings of other rounds
    message: str = ""


def run_hang(plant: Plant) -> Judged:
    """Run the federation of a hang in a separate process until the finding exists, release it, and judge it."""
    folder = Path(plant.folder)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    plant.write()
    module = f"fedvitals_studies.hangs.{MODULES[plant.host]}"
    with (folder / "log.txt").open("wb") as log:
        federation = subprocess.Popen([sys.executable, "-m", module, plant.folder], stdout=log, stderr=log)  # noqa: S603
        try:
            stall = _wait_for_finding(folder)
            client_stacks = _wait_for_client_stacks(folder, plant) if stall else 0
            plant.let_go()
            federation.wait(PATIENCE)
        finally:
            federation.kill()
            federation.wait()
    return _judge(plant, stall, client_stacks)


def _stalls(folder: Path) -> list[Event]:
    try:
        with open_reader(folder / "runs.db") as reader:
            run = queries.list_runs(reader)[0].id
            return [event for event in queries.records(reader, run, Event) if event.name == "round.stalled"]
    except (FedvitalsError, IndexError):  # not there yet
        return []


def _wait_for_finding(folder: Path) -> dict[str, Any] | None:
    """Return the first report of the hung round; None if there is none long after it hung."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        own = [event for event in _stalls(folder) if event.where.round == HUNG_ROUND]
        if own:
            return dict(own[0].data)
        hung = folder / "hung.json"
        if hung.exists() and time.time() - json.loads(hung.read_text(encoding="utf-8"))["at"] > 60:
            return None
        time.sleep(0.3)
    return None


def _wait_for_client_stacks(folder: Path, plant: Plant) -> int:
    """Return how many stacks of clients in other processes arrive within a few seconds."""
    if plant.host == "loop" or plant.kind in OF_SERVER:
        return 0
    for _ in range(20):
        newest = _stalls(folder)[-1].data["stacks"]
        others = sum(len(own) for who, own in newest.items() if who != "server")
        if others:
            return others
        time.sleep(0.3)
    return 0


def _judge(plant: Plant, stall: dict[str, Any] | None, client_stacks: int) -> Judged:
    folder = Path(plant.folder)
    false = sum(event.where.round != HUNG_ROUND for event in _stalls(folder))
    if stall is None:
        return Judged(plant.host, plant.kind, named=False, in_time=False, over=False, false=false)
    with open_reader(folder / "runs.db") as reader:
        run = queries.list_runs(reader)[0].id
        cases = [case for case in cases_of(reader, run) if case.issue == "STALLED"]
        hung = _name_of(plant, reader, run)
    phase = "evaluate" if plant.kind == "evaluate" and plant.host != "nvflare" else "train"
    phase = "aggregate" if plant.kind == "aggregate" else phase
    server = plant.kind in OF_SERVER or (plant.kind == "evaluate" and plant.host in ("loop", "processes"))
    expected: list[str] = [] if server else [hung]
    return Judged(
        plant.host,
        plant.kind,
        named=[*stall["awaited"]] == expected and stall["phase"] == phase,
        in_time=stall["seconds"] <= 2 * stall["usual_seconds"],
        over=len(cases) == 1 and not cases[0].still_there,
        awaited=tuple(stall["awaited"]),
        phase=stall["phase"],
        seconds=round(stall["seconds"], 2),
        usual=round(stall["usual_seconds"], 2),
        stacks=len(stall["stacks"].get("server", {})),
        client_stacks=client_stacks,
        false=false,
        message=cases[0].newest.message if cases else "",
    )


def _name_of(plant: Plant, reader: Any, run: str) -> str:
    """Return the host's name of the client that hangs."""
    if plant.host == "nvflare":
        return f"site-{plant.client + 1}"
    if plant.host != "flower":
        return f"c{plant.client}"
    events = [event for event in queries.records(reader, run, Event) if event.name == "client.partition"]
    nodes = {event.data.get("partition"): event.where.node for event in events}
    return str(nodes.get(plant.client))


def as_lines(judged: list[Judged]) -> list[dict[str, Any]]:
    """Return the hangs as stored."""
    return [asdict(row) for row in judged]
