# SPDX-License-Identifier: Apache-2.0
"""Try out remedies: run the experiment again with each, and report what it gains and costs.

Times are those of the virtual clock with the same random variation as before, so predictions from recorded times can be
compared with the outcome. Accuracy is that of the last evaluation, after as many updates as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from fedvitals import lab
from fedvitals.analysis.remedies import Remedy, resolve_change
from fedvitals.errors import ConfigError
from fedvitals.lab.network.virtual_clock import known_devices
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Run
from fedvitals.store.in_memory import MemoryStore

MIN_SAMPLED_ROUNDS = 20  # rounds, at least, over which times are averaged where chance chooses who takes part


@dataclass(frozen=True, slots=True)
class RerunOutcome:
    """The outcome of one re-run."""

    seconds: float  # of a round, the mean; of an asynchronous one, of as many updates as a round had before
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class RemedyTrial:
    """A remedy, what was predicted for it, and what the re-run gave."""

    remedy: Remedy
    change: dict[str, Any]  # what was set in the experiment
    before: float  # seconds of a round
    predicted: float
    measured: float
    accuracy_before: float | None
    accuracy_after: float | None

    @property
    def error(self) -> float:
        """The relative error of the predicted seconds per round."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def gain_error(self) -> float:
        """The relative error of the predicted seconds saved."""
        saved = self.before - self.measured
        return abs(self.predicted - self.measured) / abs(saved) if saved else float("inf")

    @property
    def accuracy_cost(self) -> float | None:
        """The accuracy lost; negative if it improved, None if unknown."""
        known = self.accuracy_before is not None and self.accuracy_after is not None
        return (self.accuracy_before or 0.0) - (self.accuracy_after or 0.0) if known else None


def experiment_of(run: Run) -> lab.Experiment:
    """Return the experiment of a stored run, as `fedvitals lab` stores it: without its faults."""
    text = run.config.get("experiment")
    if not isinstance(text, str):
        raise ConfigError(
            f"The run {run.id} keeps no experiment, so that it cannot be run again. Runs of the lab do, unless their "
            "experiment has objects of your own in it, or their monitor had been used before."
        )
    return lab.read(text)


def try_remedies(
    experiment: lab.Experiment,
    remedies: Sequence[Remedy],
    *,
    most: int = 3,
    repeats: int = 1,
    accuracy: str = "accuracy",
    report: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> list[RemedyTrial]:
    """Run the experiment with the first `most` remedies that the lab can apply, in order, and return the trials.

    `repeats` is the number of seeds over which accuracy is averaged, `accuracy` the metric's name. `report` is called
    with the name of each run. The rest goes to `lab.run`.
    """
    if experiment.network is None:
        raise ConfigError(
            "Remedies are tried on the lab's virtual clock, and this experiment has no network, so that nothing takes "
            'time there. Give it one, such as network = {links = "4g", devices = "phone"}.'
        )
    possible = [remedy for remedy in remedies if remedy.change is not None and _fits(experiment, remedy)][:most]
    if not possible:
        return []
    report("as it is")
    baseline = rerun(experiment, repeats=repeats, accuracy=accuracy, **how)
    trials = []
    for remedy in possible:
        report(remedy.name)
        change, again = apply_remedy(experiment, remedy)
        outcome = rerun(again, remedy.rounds_factor, repeats=repeats, accuracy=accuracy, **how)
        seconds = (baseline.seconds, remedy.after, outcome.seconds)
        trials.append(RemedyTrial(remedy, change, *seconds, baseline.accuracy, outcome.accuracy))
    return trials


def rerun(
    experiment: lab.Experiment,
    factor: float = 1.0,
    *,
    repeats: int = 1,
    accuracy: str = "accuracy",
    sinks: Sequence[Any] = (),
    **how: Any,
) -> RerunOutcome:
    """Run the experiment, and return its mean seconds per round and its final accuracy.

    `factor` is the number of its rounds that correspond to one original round, for asynchronous runs whose aggregations
    take fewer updates. With random participation the first run is extended, so that its times are averaged over enough
    rounds.
    """
    seconds, scores = 0.0, []
    rounds = round(experiment.rounds * factor)
    longer = max(rounds, MIN_SAMPLED_ROUNDS) if experiment.participation < 1 and factor == 1 else rounds
    for repeat in range(repeats):
        count, seed = longer if repeat == 0 else rounds, experiment.seed + repeat
        again = msgspec.structs.replace(experiment, rounds=count, seed=seed)
        memory = MemoryStore()
        with Monitor(None, host="lab", probes="light", detectors=(), machine=False, sinks=[memory, *sinks]) as monitor:
            result = lab.run(again, monitor, **how)
        if repeat == 0:  # the chances that were seen
            _, times = memory.history(monitor.run.id).series("time.round_virtual", None)
            seconds = float(np.mean(times)) * factor
        scores += [done.metrics[accuracy] for done in result.rounds[:rounds] if accuracy in done.metrics][-1:]
    return RerunOutcome(seconds, float(np.mean(scores)) if scores else None)


def apply_remedy(experiment: lab.Experiment, remedy: Remedy) -> tuple[dict[str, Any], lab.Experiment]:
    """Return the settings that the remedy changes, by dotted names, and the experiment with them.

    Raises ConfigError if the lab cannot run it.
    """
    if remedy.change is None:
        raise ConfigError(f"The lab cannot run «{remedy.name}»: it changes what no experiment describes.")
    change = resolve_change(remedy.change, _table(experiment))
    if not change:
        raise ConfigError(f"«{remedy.name}» changes nothing in this experiment: it sets none of {[*remedy.change]}.")
    return change, with_changes(experiment, change)


def with_changes(experiment: lab.Experiment, change: Mapping[str, Any]) -> lab.Experiment:
    """Return the experiment with changed settings, by dotted names; it is checked like a new one."""
    fields = msgspec.structs.asdict(experiment)
    for name, value in change.items():
        first, _, rest = name.partition(".")
        part = fields[first]
        if isinstance(value, Mapping) and isinstance(part, lab.Network):
            fields[first] = _with_faster_devices(part, name, value)
        else:
            fields[first] = msgspec.structs.replace(part, **{rest: value}) if rest else value
    return lab.Experiment(**fields)


def _with_faster_devices(network: lab.Network, name: str, value: Mapping[str, Any]) -> lab.Network:
    """Return the network with devices that are several times as fast."""
    devices = known_devices(network)
    if name == "network.server" and "faster" in value:
        own = devices[network.server]
        faster = msgspec.structs.replace(own, flops_per_second=own.flops_per_second * value["faster"])
        title = f"{network.server}, {value['faster']} times as fast"
        return msgspec.structs.replace(network, server=title, profiles={**network.profiles, title: faster})
    if name == "network.devices" and "loading" in value:
        quicker = {
            title: msgspec.structs.replace(device, samples_per_second=value["loading"] * device.samples_per_second)
            for title, device in devices.items()
            if device.samples_per_second
        }
        return msgspec.structs.replace(network, profiles={**network.profiles, **quicker})
    raise ConfigError(f"The lab cannot set {name} to {dict(value)!r}.")


def _fits(experiment: lab.Experiment, remedy: Remedy) -> bool:
    """Return whether the lab can run the remedy with this experiment."""
    try:
        apply_remedy(experiment, remedy)
    except ConfigError:
        return False
    return True


def _table(experiment: lab.Experiment) -> dict[str, Any]:
    """Return the experiment as a nested table, without the user's own objects."""
    parts = msgspec.structs.asdict(experiment).items()
    return {n: msgspec.to_builtins(part) for n, part in parts if isinstance(part, msgspec.Struct | int | float | str)}
