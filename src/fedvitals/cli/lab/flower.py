# SPDX-License-Identifier: Apache-2.0
"""`fedvitals lab EXPERIMENT.toml --engine flower`: the experiment as a Flower app, followed by its log and store."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvitals.cli.lab.progress import Alarms, EndedRun, Progress, remember
from fedvitals.errors import ConfigError, FedvitalsError, MissingExtraError, StoreError
from fedvitals.records import check_run_id

if TYPE_CHECKING:
    from fedvitals.lab import Experiment

WORD = "fedvitals lab: "  # as in `hosts.flower.lab.app`, which needs seconds to import
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LAST_LINES = 25  # of Flower's log, shown when it fails
SCORES = ("accuracy", "absolute_error", "attack.success")
METRICS = ("loss", "local.loss", *SCORES, *(f"local.{name}" for name in SCORES))


def check(
    *,
    unwatched: bool,
    resume: bool,
    device: str,
    precision: str,
    workers: int | None,
    superlink: str | None,
    timeout: float | None,
    **_: Any,
) -> None:
    """Raise ConfigError for what the engine cannot do, before anything is started."""
    try:
        from fedvitals.hosts.flower.lab.launch import check_installed
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "flwr", "flower", "The engine 'flower'") from error

    check_installed(simulation=superlink is None)
    if device != "cpu":
        raise ConfigError(f"The engine 'flower' trains on CPUs; on '{device}' use the engine 'stacked'.")
    if precision != "float32":
        raise ConfigError(f"The precision '{precision}' is for CUDA; the engine 'flower' trains on CPUs, in float32.")
    if unwatched:
        raise ConfigError("The engine 'flower' reports its results through the store: leave --unwatched out.")
    if superlink is not None and resume:
        raise ConfigError(
            "A run on a SuperLink leaves no state here to resume from: leave --resume or --superlink out."
        )
    if workers is not None and workers < 1:
        raise ConfigError(f"The number of SuperNodes (--workers) cannot be {workers}: it is at least 1.")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"The seconds that a round's answers may take (--timeout) cannot be {timeout}.")


def train(
    experiment: Experiment,
    view: Progress,
    alarms: Alarms,
    *,
    store: str,
    folder: Path,
    run: str | None,
    resume: bool,
    probes: str,
    data: str | None,
    workers: int | None,
    superlink: str | None,
    timeout: float | None,
    tape: bool | None,
    tape_budget: str,
    **_: Any,
) -> EndedRun:
    """Run the experiment in other processes; progress comes from Flower's log, the result from the store."""
    from fedvitals.hosts.flower.lab import launch
    from fedvitals.lab.data.sources import search_folders
    from fedvitals.store import store_target

    where, began = store_target(store), time.time()
    run = check_run_id(run) if run else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    nodes = workers or (1 if superlink else min(experiment.clients, os.cpu_count() or 1))
    settings: dict[str, Any] = {"experiment": experiment.to_toml(), "run": run, "probes": probes, "nodes": nodes}
    settings |= {} if timeout is None else {"timeout": timeout}
    settings |= {"tape-budget": "" if tape is False else tape_budget}
    settings |= {} if data is None else {"data": str(Path(data).absolute())}
    if isinstance(where, Path):
        settings["store"] = str(where.absolute())
    log: deque[str] = deque(maxlen=LAST_LINES)
    heard = _hearing(view, log)
    if superlink is None:
        _check_here(experiment, data)
        remember(folder, run, experiment)
        settings |= {"checkpoint": str(folder.absolute()), "resume": resume}
        own = {} if isinstance(where, Path) else {"FEDVITALS_STORE": where}
        # Flower's processes have a different working folder
        own |= {"FEDVITALS_DATA": str(search_folders()[0].absolute())}
        view.say(f"Starting Flower on Ray with {nodes} {'nodes' if nodes > 1 else 'node'}, which takes a while.")
        launch.simulate(settings, nodes, heard, own)
    else:
        launch.submit(settings, superlink, heard)
    ended = _ended_run(store, run, alarms, began)
    if ended is None or ended.rounds < experiment.rounds:
        raise _failure(store, run, experiment.rounds, view.done, log)
    view.done = ended.rounds
    return ended


def _check_here(experiment: Experiment, data: str | None) -> None:
    """Report at once what the server would refuse; with a remote server, the data need not be here."""
    from fedvitals.hosts.flower.lab.engine import experiment_text
    from fedvitals.lab.run import prepare_site

    experiment_text(prepare_site(experiment, data).experiment)


def _hearing(view: Progress, log: deque[str]) -> Callable[[str], None]:
    """Return a function that takes the lines of Flower's log and shows those that are ours."""
    from fedvitals.lab import Round

    def hear(line: str) -> None:
        _, ours, text = line.partition(WORD)
        if not ours:
            log.append(COLOURS.sub("", line).rstrip())
            return
        try:
            message = json.loads(text)
        except ValueError:
            view.say(text.strip())
            return
        if isinstance(message, dict) and "error" in message:
            raise ConfigError(str(message["error"]))
        if isinstance(message, dict) and {"round", "seconds", "metrics"} <= message.keys():
            view.show(Round(int(message["round"]), float(message["seconds"]), dict(message["metrics"])))

    return hear


def _ended_run(store: str, run: str, alarms: Alarms, since: float) -> EndedRun | None:
    """Return how the run ended, from the store; None if the run is not in it."""
    from fedvitals.store import open_reader

    try:
        with open_reader(store) as reader:
            history = reader.history(run)
            rounds, series = history.rounds(), {name: history.series(name, None) for name in METRICS}
            alarms.write([event for event in history.events() if event.at >= since])
    except StoreError:
        return None
    metrics = {name: values[-1] for name, (at, values) in series.items() if at and at[-1] == rounds[-1]}
    return EndedRun(run, len(rounds), metrics, "flower") if rounds else None


def _failure(store: str, run: str, wanted: int, heard: int, log: deque[str]) -> FedvitalsError:
    if heard < wanted:
        text = f"The run {run} ended after {heard} of {wanted} rounds. The end of Flower's log:\n"
        return FedvitalsError(text + "\n".join(log))
    return StoreError(
        f"The run {run} is over, and is not in the store '{store}' as it is seen from here: the ServerApp has written "
        "it where it runs. Let both have the same, such as a database: --store postgresql://... here, and in "
        "FEDVITALS_STORE of the SuperLink."
    )
