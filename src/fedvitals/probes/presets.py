# SPDX-License-Identifier: Apache-2.0
"""What is measured when: three presets, or the user's own list.

| probe | light | standard | deep |
| --- | --- | --- | --- |
| samples, timing, memory | client-round | client-round | client-round |
| fit | in turns, 0.2 % of the training's work | in turns, 0.7 % | each client-round, 64 samples |
| training losses by class | no | every eighth round | each client-round |
| gradients | norm, as the scope closes | each step, stored merged | each step, stored each step; histogram |
| weights | global model, each round | and each client-round | and their difference at each step |
| updates | norm, cosine to the others | and per layer, own past, peers, sketch | the same |
| gradient scale | no | 16 samples, in turns, 2.5 % of the training's work | each client-round |
| activations | no | no | one step in 25 |
| nonlinearity, gradient over the whole set | no | no | every fifth round |

Measurements in turns are budgeted in sample-passes (`allowance`), with a floor: each client once in every 4 rounds
(fit: 2, in `light` 20). The gradient scale of some client is measured in each round, and of all clients in the first;
so is the fit of some client, if there are at least half as many clients as rounds in its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError, unknown
from fedvitals.probes.allowance import FLOOR_ROUNDS, UNSTATED, StatesWork, one_step_in
from fedvitals.protocols import Probe, Schedule, name_of
from fedvitals.schedule import always, at_exit

NAMES = LIGHT, STANDARD, DEEP = ("light", "standard", "deep")

# Of the training's sample-passes; and the rounds within which every client is measured once at any cost. As
# seconds, in the demo's federation: 0.2 and 1.1 % for fit, 1.8 % for the gradient scale.
LIGHT_FIT_PERCENT, LIGHT_FIT_ROUNDS = 0.2, 20
FIT_PERCENT, FIT_ROUNDS = 0.7, 2
LOSS_ROUNDS = (
    8  # training losses take 1.4 ms of a client-round: 12 % of the smallest models' training, 4 % of the demo's
)
OWN, OWN_FIT_PERCENT = "own", 1.0  # a list of a user's probes alone
SCALE_PERCENT, SCALE_ROUNDS = 2.5, 4
ACTIVATION_STEPS = 25  # one in this many is measured, which takes half as long again


@dataclass(frozen=True, slots=True)
class Planned:
    """A probe and when it runs: at the steps that `when` grants, or once when the client's scope closes.

    Args:
        probe: A function of a `View` that returns numbers by name.
        when: A schedule, such as `fv.every(5)`.
        each: Whether to store every measurement, not only what they merge to.
        percent: For a probe that runs when the scope closes: the share of the training's work that it may take.
            Clients take turns.
        rounds: The interval in rounds between two measurements; 1: in each round.
        floor_rounds: With `percent`: each client is measured at least once in this many rounds, at any cost.
    """

    probe: Probe
    when: Schedule = at_exit
    each: bool = False  # store every measurement, in addition to the merged result
    percent: float | None = None  # of the training's work, for a probe run as the scope closes; clients take turns
    rounds: int = 1  # every so many rounds
    floor_rounds: int = FLOOR_ROUNDS  # with a percent: each client is measured once in this many rounds, at any cost

    @property
    def name(self) -> str:
        """The probe's name. It never contains the arguments of a `partial`, which may belong to a client."""
        return name_of(self.probe)

    def work(self, samples: int) -> float:
        """Return how many samples pass through the model in one measurement of a client with this many samples.

        Args:
            samples: The number of samples that the client has.
        """
        return self.probe.work(samples) if isinstance(self.probe, StatesWork) else float(UNSTATED)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of probes with their schedules.

    Args:
        name: Its name, which is kept with the run.
        probes: The probes with their schedules, as `Planned`.
        fit_percent: The share of the training's work that measuring the fit may take.
        brief: Whether to measure only the norm of a client's weights and update, and the cosine to the others.
        difference_each_step: Whether to measure how far the weights have moved at every step.
        fit_floor_rounds: Each client's fit is measured at least once in this many rounds, at any cost.
        training_losses: The interval in rounds at which losses by class are measured of the samples that a client
            trains on; 0: never.
    """

    name: str
    probes: tuple[Planned, ...]
    fit_percent: (
        float | None
    )  # of the training's work; None: each client-round with as many samples as allowed; 0: never
    brief: bool = False  # for a client's weights and update, only the norm and the cosine to the others
    difference_each_step: bool = False
    fit_floor_rounds: int = FLOOR_ROUNDS  # each client's fit is measured once in this many rounds, at any cost
    training_losses: int = 0  # interval in rounds, by class, for the samples that a client trains on; 0: never

    def measures_losses(self, round_index: int | None) -> bool:
        """Return whether training losses are measured in a round.

        Args:
            round_index: The round.
        """
        return self.training_losses > 0 and (round_index or 0) % self.training_losses == 0


def preset(name: str) -> Preset:
    """Return a preset by name. Each call makes a new one, because a schedule may hold the state of one run.

    Args:
        name: «light», «standard» or «deep».

    Returns:
        The preset, whose `probes` may be changed before it is passed to a monitor.
    """
    check_name(name)
    try:  # probes import torch, which takes over a second, so only once they are used
        from fedvitals.probes.activations import activations  # noqa: PLC0415
        from fedvitals.probes.full_gradient import full_gradient  # noqa: PLC0415
        from fedvitals.probes.gradients import gradient_histogram, gradients, last_gradient  # noqa: PLC0415
        from fedvitals.probes.nonlinearity import nonlinearity  # noqa: PLC0415
        from fedvitals.probes.scale import scale  # noqa: PLC0415
        from fedvitals.probes.weights import weights  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtraError("torch", "torch", "Measuring a PyTorch model") from error

    match name:
        case "light":
            return Preset(
                "light",
                (Planned(last_gradient),),
                fit_percent=LIGHT_FIT_PERCENT,
                fit_floor_rounds=LIGHT_FIT_ROUNDS,
                brief=True,
            )
        case "standard":
            in_turns = Planned(scale(), percent=SCALE_PERCENT, floor_rounds=SCALE_ROUNDS)
            probes = (Planned(gradients, always), Planned(weights), in_turns)
            return Preset(
                "standard", probes, fit_percent=FIT_PERCENT, fit_floor_rounds=FIT_ROUNDS, training_losses=LOSS_ROUNDS
            )
        case _:
            return Preset(
                "deep",
                (
                    Planned(gradients, always, each=True),
                    Planned(gradient_histogram, always),
                    Planned(weights),
                    Planned(activations, partial(one_step_in, ACTIVATION_STEPS)),
                    Planned(scale()),
                    Planned(nonlinearity(), rounds=5),
                    Planned(full_gradient, rounds=5),
                ),
                fit_percent=None,
                difference_each_step=True,
                training_losses=1,
            )


def check_name(name: str) -> None:
    """Raise ConfigError unless the preset exists."""
    if name not in NAMES:
        raise ConfigError(unknown("preset", name, NAMES))


def preset_without_torch(probes: Any) -> Preset:
    """Return the preset for `probes=` where no probe can run because torch is not installed."""
    if isinstance(probes, str):
        check_name(probes)
        return Preset(probes, (), fit_percent=None, brief=probes == LIGHT)
    return Preset("own", (), fit_percent=None)


def resolve(probes: str | Preset | Sequence[str | Preset | Planned | Probe | tuple[Probe, Schedule]]) -> Preset:
    """Return the preset for `probes=`: a preset, or a list of a preset and the user's own probes.

    In a list, a plain function runs once per client-round; a pair (function, schedule) at the steps of its schedule.
    """
    if isinstance(probes, str):
        return preset(probes)
    if isinstance(probes, Preset):
        return probes
    if callable(probes):
        raise ConfigError("probes= takes a preset's name or a list: probes=['standard', my_probe].")
    chosen = Preset(OWN, (), fit_percent=OWN_FIT_PERCENT)
    own: list[Planned] = []
    for entry in probes:
        match entry:
            case str() | Preset():
                chosen = preset(entry) if isinstance(entry, str) else entry
            case Planned():
                own.append(entry)
            case (probe, when) if callable(probe) and callable(when):
                own.append(Planned(probe, when))
            case _ if callable(entry):
                own.append(Planned(entry))
            case _:
                raise ConfigError(
                    f"A probe is a function of a View, a pair (function, schedule), or a preset's name; got {entry!r}."
                )
    return replace(chosen, probes=(*chosen.probes, *own), name=chosen.name if not own else f"{chosen.name}+own")
