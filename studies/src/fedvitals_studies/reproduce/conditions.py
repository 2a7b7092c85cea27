# SPDX-License-Identifier: Apache-2.0
"""Everything that `fedvitals reproduce gsc` runs: one row per condition, with each setting written out.

A setting that is not named in a row has the paper's value, or ours if the paper does not specify it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fedvitals.errors import ConfigError, unknown

TOPOLOGIES = ("centralized", "clustered", "hierarchical", "rings")
SCENARIOS = ("baseline", "exploding", "vanishing")
STUDIES = ("initial", "extended", "beyond", "sensitivity", "factorial", "epochs", "likeliest")
PAPER_STUDIES = ("initial", "extended")
PAPER_CLIENTS, PAPER_ITERATIONS = 100, 20
PASS = 20  # mini-batches of 16 in a pass over a client's 313 images
QUICK_CLIENTS, QUICK_ROUNDS = 10, 6
TINY = {"clients": 4, "rounds": 4, "iterations": 4}  # for the factorial, whose rehearsal has some hundred runs


@dataclass(frozen=True, slots=True)
class Condition:
    """One federation to be trained, once per repeat."""

    name: str
    study: str
    topology: str = "centralized"
    scenario: str = "baseline"
    clip: float | None = 1.0
    clip_by: str = "norm"  # of each weight tensor's gradient; or "value", each entry separately
    alpha: float | None = None  # Dirichlet label skew; None: dealt by image, equally
    by_track: bool = False  # photos of one sign stay with one client
    drop_out: float = 0.0  # share of the clients that do not answer, drawn in each round
    learning_rate: float = 1e-3
    model: str = "paper-cnn"
    paper_weights: bool = False  # of another network: the paper's activations and first weights, not a wrong gain
    channels: tuple[int, int] = (32, 64)
    kernel: int = 3
    slope: float = 0.3  # of LeakyReLU
    dense: str = "glorot"  # initial weights of the dense layer; or "torch", its default there
    pool: str = "max"  # of 2 × 2 pixels after each convolution; or "average", "none"
    scale_pixels: bool = True
    keep_optimizer: bool = False  # whether Adam's state is kept between rounds
    rounds: int = 25
    clients: int = PAPER_CLIENTS
    iterations: int = PAPER_ITERATIONS  # mini-batches per round
    epochs: int | None = None  # instead of iterations: passes over the client's data
    batches: int = 1  # mini-batches in a local iteration, after which edges average and rings pass on
    every_iteration: bool = False  # measured after each local iteration, not only after the last one of a round
    whole_set: bool = False  # also gradients over the client's whole set, besides those of the last batch
    dataset: str = "gtsrb"

    @property
    def clipped(self) -> bool:
        return self.clip is not None

    @property
    def client_steps(self) -> int:
        """Return the mini-batches of training in one repeat, from which the time is estimated."""
        a_round = self.iterations if self.epochs is None else self.epochs * PASS
        return self.clients * self.rounds * a_round * self.batches

    @property
    def paper(self) -> bool:
        """Whether it is one of the paper's own conditions."""
        return self.study in PAPER_STUDIES

    @property
    def scale_each(self) -> bool:
        """Whether gradient scale is measured at every iteration, if anything is."""
        return self.every_iteration and (self.paper or self.study == "likeliest")

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings that differ from the default, by name."""
        plain = Condition(self.name, self.study)
        names = [field.name for field in dataclasses.fields(self) if field.name not in {"name", "study"}]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}


def _initial() -> tuple[Condition, ...]:
    """Return the initial study without clipping, then with it; hierarchical ones are measured at each iteration
    (Figures 7 to 10).
    """
    return tuple(
        Condition(
            f"initial-{topology}-{'unclipped' if clip is None else 'clipped'}",
            "initial",
            topology,
            clip=clip,
            every_iteration=topology == "hierarchical",
            whole_set=clip is not None,
        )
        for clip in (None, 1.0)
        for topology in TOPOLOGIES
    )


def _extended() -> tuple[Condition, ...]:
    return tuple(
        Condition(
            f"extended-{topology}-{scenario}",
            "extended",
            topology,
            scenario,
            clip=1.0 if scenario == "baseline" else None,
            rounds=50,
            every_iteration=topology == "hierarchical",
            whole_set=True,
        )
        for topology in ("centralized", "hierarchical")
        for scenario in SCENARIOS
    )


BEYOND: tuple[tuple[str, dict[str, object]], ...] = (
    ("alpha-1.0", {"alpha": 1.0}),
    ("alpha-0.3", {"alpha": 0.3}),
    ("alpha-0.1", {"alpha": 0.1}),
    ("drop-out", {"drop_out": 0.3}),
    ("fast-rate", {"learning_rate": 1e-2}),
    ("slow-rate", {"learning_rate": 1e-4}),
    ("by-track", {"by_track": True}),
)
"""What the paper names as open, each in all four topologies."""

MODELS: tuple[tuple[str, dict[str, object]], ...] = (
    ("mlp", {}),
    # A few clients and rounds show whether the scenarios can be told apart; these networks are expensive on a CPU.
    ("transformer", {"clients": 20, "rounds": 10}),
    ("resnet", {"clients": 10, "rounds": 5}),
)

SENSITIVITY: tuple[tuple[str, dict[str, object]], ...] = (
    ("channels", {"channels": (16, 32)}),
    ("kernel", {"kernel": 5}),
    ("slope", {"slope": 0.01}),
    ("dense", {"dense": "torch"}),
    ("pixels", {"scale_pixels": False}),
    ("clip-value", {"clip_by": "value"}),
    ("keep-adam", {"keep_optimizer": True}),
    ("average-pool", {"pool": "average"}),
    # An iteration as a whole pass over the data is twenty times the work: five rounds show the effect.
    ("epochs", {"epochs": 20, "rounds": 5}),
    # Without pooling there are four times as many pixels for the second convolution, and 18 times as many weights.
    ("no-pool", {"pool": "none", "rounds": 10}),
)
"""What the paper leaves open, one choice changed at a time, centralized."""

IN_ALL_SCENARIOS = ("channels", "kernel", "dense", "pixels", "average-pool", "no-pool")
"""Choices that also change the exploding and the vanishing network: ten rounds of each show whether they still part."""

UNCLIPPED_TOO = ("kernel", "pixels", "keep-adam")
"""Choices with which the first study's claims are looked at again, which are about topologies without clipping."""

UNCLIPPED_TOPOLOGIES = ("centralized", "hierarchical", "rings")


DEAR = ("epochs", "no-pool")


def _beyond() -> tuple[Condition, ...]:
    fields = [
        {"name": f"beyond-{name}-{topology}", "topology": topology, **settings}
        for name, settings in BEYOND
        for topology in TOPOLOGIES
    ]
    fields += [
        {
            "name": f"beyond-{model}-{scenario}",
            "model": model,
            "scenario": scenario,
            "clip": 1.0 if scenario == "baseline" else None,
            **settings,
        }
        for model, settings in MODELS
        for scenario in SCENARIOS
    ]
    fields += [
        {"name": f"beyond-{model}-paper-{scenario}", "model": model, "scenario": scenario, "clip": None,
         "paper_weights": True, **settings}
        for model, settings in MODELS
        for scenario in SCENARIOS[1:]
    ]  # fmt: skip
    return tuple(Condition(study="beyond", **each) for each in fields)  # type: ignore[arg-type]


def _sensitivity() -> tuple[Condition, ...]:
    fields = [{"name": f"sensitivity-{name}", **settings} for name, settings in SENSITIVITY]
    fields += [
        {"name": f"sensitivity-{name}-{scenario}", "scenario": scenario, "clip": None, "rounds": 10, **settings}
        for name, settings in SENSITIVITY
        if name in IN_ALL_SCENARIOS
        for scenario in SCENARIOS[1:]
    ]
    fields += [
        {"name": f"sensitivity-{name}-{topology}-unclipped", "topology": topology, "clip": None, **settings,
         "every_iteration": topology == "hierarchical"}
        for name, settings in SENSITIVITY
        if name in UNCLIPPED_TOO
        for topology in UNCLIPPED_TOPOLOGIES
    ]  # fmt: skip
    # The expensive ones last: if time runs out, the others are done.
    fields.sort(key=lambda each: any(word in str(each["name"]) for word in DEAR))
    return tuple(Condition(study="sensitivity", **each) for each in fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Reading:
    """One interpretation of what the paper leaves open about its network, pixels, optimiser and iterations."""

    pool: bool = True
    scale_pixels: bool = True
    keep_optimizer: bool = False
    epochs: bool = False  # a local iteration is a pass over the client's data

    @property
    def name(self) -> str:
        words = ("pool" if self.pool else "nopool", "scaled" if self.scale_pixels else "raw")
        adam = "kept" if self.keep_optimizer else "fresh"
        return "-".join((*words, adam, *(["epochs"] if self.epochs else [])))

    @property
    def words(self) -> str:
        return ", ".join(
            (
                "pooling" if self.pool else "no pooling",
                "pixels ÷ 255" if self.scale_pixels else "pixels 0 to 255",
                f"Adam {'kept' if self.keep_optimizer else 'fresh each round'}",
                *(["an iteration is an epoch"] if self.epochs else []),
            )
        )

    def condition_of(self, paper: str) -> str:
        """Return the name of one of the paper's conditions under this reading."""
        return f"under-{self.name}-{paper}"

    def conditions(self) -> tuple[Condition, ...]:
        """Return all of the paper's conditions under this reading: the initial ones are the factorial's cells."""
        return tuple(self._read(condition) for condition in (*_initial(), *_extended()))

    def _read(self, condition: Condition) -> Condition:
        study = "likeliest" if condition.study == "extended" else "epochs" if self.epochs else "factorial"
        return dataclasses.replace(
            condition,
            name=self.condition_of(condition.name),
            study=study,
            pool="max" if self.pool else "none",
            scale_pixels=self.scale_pixels,
            keep_optimizer=self.keep_optimizer,
            batches=PASS if self.epochs else 1,
            whole_set=condition.study == "extended",
        )


READINGS: tuple[Reading, ...] = tuple(
    Reading(pool, scaled, kept, epochs)
    for epochs in (False, True)
    for pool in (True, False)
    for scaled in (True, False)
    for kept in (False, True)
)
OURS = Reading()


# The extended study before the clipped half of the initial one, two of whose runs are the beginnings of its own.
_UNCLIPPED, _CLIPPED = _initial()[:4], _initial()[4:]
CONDITIONS: tuple[Condition, ...] = (*_UNCLIPPED, *_extended(), *_CLIPPED, *_sensitivity(), *_beyond())
FACTORIAL: tuple[Condition, ...] = tuple(condition for reading in READINGS for condition in reading.conditions())
"""The 64 cells of one mini-batch per iteration, the 64 of an epoch, and the extended study under each reading: of the
latter two, only those of the reading that agrees best are run (`factorial.py`)."""
OTHER_NETWORKS: tuple[Condition, ...] = tuple(condition for condition in CONDITIONS if condition.paper_weights)
"""The paper's exploding and vanishing first weights in networks that are not the paper's."""
SETTLING = (*OTHER_NETWORKS, *FACTORIAL)
BY_NAME = {condition.name: condition for condition in (*CONDITIONS, *FACTORIAL)}

BEGINNING_OF = {
    "initial-centralized-clipped": "extended-centralized-baseline",
    "initial-hierarchical-clipped": "extended-hierarchical-baseline",
}
"""With the same seed, the shorter run is the beginning of the longer one, bit for bit: it need not be trained again."""

MEASURED = ("every_iteration", "whole_set")
"""Settings that say what is measured, not what is trained: who has measured more has what others ask for."""


def richly(condition: Condition) -> Condition:
    """Return the condition measured as on a GPU, where measuring is cheap: the paper's own at every iteration."""
    return dataclasses.replace(condition, every_iteration=True) if condition.paper else condition


IN_QUICK = ("sensitivity-slope", "beyond-alpha-0.3-centralized")


def quick(dataset: str) -> tuple[Condition, ...]:
    """Return a rehearsal: the paper's conditions and two others, with ten clients and six rounds."""
    chosen = [c for c in CONDITIONS if c.study in {"initial", "extended"} or c.name in IN_QUICK]
    small = {"clients": QUICK_CLIENTS, "rounds": QUICK_ROUNDS, "dataset": dataset}
    return tuple(dataclasses.replace(condition, **small) for condition in chosen)  # type: ignore[arg-type]


def quick_factorial(condition: Condition, dataset: str = "gtsrb") -> Condition:
    """Return a condition of the factorial as rehearsed."""
    return dataclasses.replace(condition, dataset=dataset, **TINY)  # type: ignore[arg-type]


def chosen(conditions: Iterable[Condition], only: Iterable[str]) -> tuple[Condition, ...]:
    """Return the conditions that `only` names: by name, by study, or by a pattern such as `*-rings*`; all if it is
    empty.
    """
    conditions, wanted = tuple(conditions), tuple(only)
    for word in wanted:
        if not any(_means(word, condition) for condition in conditions):
            raise ConfigError(unknown("condition or study", word, {*STUDIES, *(c.name for c in conditions)}))
    return tuple(c for c in conditions if not wanted or any(_means(word, c) for word in wanted))


def _means(word: str, condition: Condition) -> bool:
    return word == condition.study or fnmatchcase(condition.name, word)
