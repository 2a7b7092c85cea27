# SPDX-License-Identifier: Apache-2.0
"""The lab as a Flower app: the server runs the experiment, round by round; clients train as requested.

What it runs is in the run's configuration (`LabAppSettings`), which `launch` writes.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import Any

import msgspec
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedvitals import lab
from fedvitals.errors import ConfigError, FedvitalsError, RecordError
from fedvitals.hosts.flower.lab.engine import TIMEOUT, FlowerEngine
from fedvitals.hosts.flower.lab.messages import read_request, write_reply
from fedvitals.hosts.lab_monitor import monitor_of
from fedvitals.lab.engines.engine import single_threaded
from fedvitals.lab.engines.executor import ClientByClientExecutor
from fedvitals.lab.engines.site import Site
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.replay.tape.tape import Tape

LOG_PREFIX = "fedvitals lab: "  # prefix of the lines of the server's log that the launcher shows
MOST_TELEMETRY = 16 << 20  # bytes of one answer
DATA = "fedvitals-data"  # in a SuperNode's --node-config: its own folder of data sets

server_app, client_app = ServerApp(), ClientApp()


class LabAppSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A run's configuration; empty values mean the default."""

    experiment: str  # TOML
    store: str = ""  # default: FEDVITALS_STORE in the server's own environment
    run: str = ""
    probes: str = "standard"
    data: str = ""
    nodes: int = 1
    timeout: float = TIMEOUT
    tape_budget: str = ""  # default: no tape
    checkpoint: str = ""
    resume: bool = False


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the whole experiment; errors of the configuration are reported to the launcher."""
    try:
        _run(grid, context)
    except FedvitalsError as error:
        _log_line(json.dumps({"error": str(error)}))
        raise


def _run(grid: Grid, context: Context) -> None:
    try:
        settings = msgspec.convert(dict(context.run_config), LabAppSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The configuration of this run cannot be read: {error}.") from error
    if settings.store == "" and "FEDVITALS_STORE" not in os.environ:
        raise ConfigError("The server knows no store: set FEDVITALS_STORE in the environment of the SuperLink.")
    experiment = lab.read(settings.experiment)
    engine = functools.partial(FlowerEngine, grid=grid, nodes=settings.nodes, timeout=settings.timeout, say=_log_line)
    tape = Tape(budget=settings.tape_budget) if settings.tape_budget else None
    with monitor_of(
        experiment, settings.store or "runs.db", run=settings.run or None, probes=settings.probes, tape=tape
    ) as watching:
        for result in lab.rounds(
            experiment,
            watching,
            engine=engine,
            data=settings.data or None,
            checkpoint=settings.checkpoint or None,
            resume=settings.resume,
        ):
            if result.rounds:
                last = result.rounds[-1]
                _log_line(json.dumps({"round": last.number, "seconds": last.seconds, "metrics": last.metrics}))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train clients of the lab, one after the other, as the server asks."""
    request = read_request(message.content)
    data = context.node_config.get(DATA) or context.run_config.get("data") or None
    executor = _executor(request.experiment, None if data is None else str(data))
    site = executor.site
    for task in request.tasks:
        if task.start.shape != (site.layout.size,) or not set(task.nodes) <= set(site.shards):
            raise RecordError(
                f"A task of {', '.join(task.nodes)[:80]} with {len(task.start)} numbers does not fit the experiment. "
                "Install the same fedvitals and PyTorch on all machines."
            )
    states = torch.empty(sum(len(task.nodes) for task in request.tasks), site.layout.size)
    with single_threaded():
        updates = executor.train(request.tasks, request.watcher, states)
    return Message(content=write_reply(updates, states, _payload(request.watcher)), reply_to=message)


@functools.lru_cache(maxsize=1)
def _executor(experiment: str, data: str | None) -> ClientByClientExecutor:
    """Return the executor of an experiment, kept for the life of the process: on Ray for all rounds."""
    return ClientByClientExecutor(Site.of(lab.read(experiment), data), fast=False)


def _payload(watcher: Any) -> bytes:
    """Return the telemetry; self-contained, since the previous reply may have been lost."""
    return watcher.payload(MOST_TELEMETRY) if isinstance(watcher, WorkerObserver) else b""


def _log_line(text: str) -> None:
    logging.getLogger("flwr").info("%s%s", LOG_PREFIX, text)
