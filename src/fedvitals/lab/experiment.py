# SPDX-License-Identifier: Apache-2.0
"""The description of an experiment: the data, the model, the federation and its faults; the same in TOML.

Experiment(dataset="digits", model="cnn", clients=20, rounds=15, seed=7, topology=Hierarchical(edges=4),
           aggregator=trimmed_mean(0.1), partition=dirichlet(0.3), faults=[label_noise(nodes=["c4"], rate=0.8)])
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Literal

import msgspec

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab import toml
from fedvitals.lab.adapters import ADAPTERS
from fedvitals.lab.aggregators.averages import AVERAGING, FedAvg
from fedvitals.lab.aggregators.drift import DRIFT
from fedvitals.lab.aggregators.fednova import FedNova
from fedvitals.lab.aggregators.robust import ROBUST
from fedvitals.lab.aggregators.votes import MajorityVote
from fedvitals.lab.compression import COMPRESSIONS
from fedvitals.lab.data import datasets
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.partition import IID, PARTITIONS
from fedvitals.lab.data.small import Digits
from fedvitals.lab.description import Part, kind_of, require
from fedvitals.lab.faults.fault import Fault
from fedvitals.lab.faults.table import FAULTS
from fedvitals.lab.learning_rates import SCHEDULES
from fedvitals.lab.local import OPTIMIZERS, Clip, Local
from fedvitals.lab.losses import LOSSES
from fedvitals.lab.models.catalog import MODELS
from fedvitals.lab.models.images import CNN
from fedvitals.lab.network.virtual_clock import Network
from fedvitals.lab.parameters import Parameters
from fedvitals.lab.population import CHANGES, Population
from fedvitals.lab.privacy import PRIVACY
from fedvitals.lab.secure_aggregation import SecureAggregation
from fedvitals.lab.topologies.asynchronous import Asynchronous
from fedvitals.lab.topologies.centralized import Centralized
from fedvitals.lab.topologies.clustered import Clustered
from fedvitals.lab.topologies.hierarchical import Hierarchical
from fedvitals.lab.topologies.ring_stars import Ring, RingStars
from fedvitals.lab.topologies.rings import Rings

AGGREGATORS = (*AVERAGING, FedNova, *DRIFT, *ROBUST, MajorityVote)
TOPOLOGIES = (Centralized, Clustered, Hierarchical, Rings, RingStars, Ring, Asynchronous)


class Evaluation(Part, frozen=True):
    """How often the global model is evaluated on the test set, and whether on the clients' own tests as well.

    Args:
        every: The interval in rounds between two evaluations; the last round is always evaluated.
        local: Whether to evaluate on the clients' local tests: of all of them, or («cohort») of those that trained.
    """

    every: int = 1
    local: bool | Literal["cohort"] = True  # also on the clients' local tests: of all, or of those that trained

    def __post_init__(self) -> None:
        require(self.every >= 1, "number of rounds between evaluations", self.every, "at least 1")


class Experiment(Part, frozen=True, kw_only=True):
    """One experiment. Parts may be given as objects, as tables, or by the name of their kind: `model=lab.CNN()`,
    `model={"kind": "cnn"}`, `model="cnn"`.

    Args:
        name: A name for people.
        dataset: The data set, such as `lab.Digits()` or `lab.Arrays(x, y)`.
        partition: How its samples are dealt to the clients, such as `lab.Dirichlet(0.3)`.
        test_share: The share of each client's samples that is kept for its local test.
        model: The model, such as `lab.CNN()` or `lab.Own(factory)`.
        parameters: Which parameters are trained and sent; by default all.
        loss: The loss; by default the usual one for the data set's targets.
        local: The local training of a client in a round.
        clients: The number of clients, named c0, c1, ...
        participation: The share of the clients that train in each round.
        rounds: The number of rounds.
        topology: Who averages with whom, such as `lab.Hierarchical(edges=4)`.
        aggregator: How updates become the next model, such as `lab.TrimmedMean(0.1)`.
        compression: How updates are encoded, such as `lab.TopK(0.01)`; None: not at all.
        privacy: Differential privacy, such as `lab.CentralDP()`; None: none.
        secure_aggregation: Whether and how the server sees sums alone.
        faults: Faults to plant, such as `lab.LabelNoise(nodes=["c4"], rate=0.8, since=5)`.
        network: Links and devices on a virtual clock; None: no times are simulated.
        population: Who joins and leaves when, and whose data change.
        evaluation: When the model is evaluated.
        seed: The seed of everything that is random.
        repeats: How often `fedvitals lab` runs it, with consecutive seeds.
    """

    name: str = "experiment"
    dataset: Any = Digits()
    partition: Any = IID()
    test_share: float = 0.2  # of each client's samples, kept for its local test
    model: Any = CNN()
    parameters: Parameters | None = None  # which train and travel; by default all
    loss: Any = None  # by default the usual one for the data set's targets
    local: Local = Local()
    clients: int = 10
    participation: float = 1.0  # share of the clients that is asked in each round
    rounds: int = 10
    topology: Any = Centralized()
    aggregator: Any = FedAvg()
    compression: Any = None
    privacy: Any = None
    secure_aggregation: SecureAggregation | None = None
    faults: tuple[Any, ...] = ()
    network: Network | None = None
    population: Population | None = None
    evaluation: Evaluation = Evaluation()
    seed: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        for field, kinds in CHOICES.items():
            msgspec.structs.force_setattr(self, field, _resolve_kind(field, getattr(self, field), kinds))
        if not isinstance(self.faults, list | tuple):
            raise ConfigError(f"The faults are a list, such as [lab.label_noise(nodes=['c4'])]; got {self.faults!r}.")
        faults = tuple(_resolve_kind("faults", fault, kinds_of(FAULTS)) for fault in self.faults)
        msgspec.structs.force_setattr(self, "faults", faults)
        for field, part in PARTS.items():
            msgspec.structs.force_setattr(self, field, _resolve_part(field, getattr(self, field), part))
        for field, kind in SCALARS.items():
            value = getattr(self, field)
            fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
            require(fits and not isinstance(value, bool), field, value, f"of type {kind.__name__}")
        require(self.clients >= 1, "number of clients", self.clients, "at least 1")
        require(self.rounds >= 1, "number of rounds", self.rounds, "at least 1")
        require(self.repeats >= 1, "number of repeats", self.repeats, "at least 1")
        require(0 < self.participation <= 1, "participation", self.participation, "above 0, up to 1")
        require(0 <= self.test_share < 1, "test share", self.test_share, "from 0, below 1")
        if self.population is not None:
            self.population.check(self)
        self.topology.check(self)
        if self.parameters is not None:
            self.parameters.check(self)
        self._check_aggregator()
        for transformation in (self.privacy, self.secure_aggregation):
            if transformation is not None:
                transformation.check(self)

    def _check_aggregator(self) -> None:
        """Check that the aggregator fits, and that enough updates come together for it: from clients, edges, a
        buffer or the members of a star.
        """
        if hasattr(self.aggregator, "check"):
            self.aggregator.check(self)
        asked = max(1, round(self.fewest_members * self.participation))
        gathered = getattr(self.topology, "updates_together", None)
        count = gathered(asked) if gathered else asked
        least = getattr(self.aggregator, "min_updates", 1)
        if count < least:
            kind = kind_of(type(self.aggregator).__name__)
            raise ConfigError(
                f"The aggregator {kind} needs at least {least} updates in a round, and {count} come together here. "
                "Ask more clients, or expect fewer faulty ones."
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        return _node_names(self.clients)

    def members(self, round_index: int) -> tuple[str, ...]:
        """Return the clients that are in the federation in a round."""
        return self.nodes if self.population is None else self.population.present(self.nodes, round_index)

    @property
    def fewest_members(self) -> int:
        """The number of clients in the round in which they are fewest."""
        return self.clients if self.population is None else self.population.fewest(self.nodes)

    def needed(self, round_index: int) -> int:
        """Return the number of clients whose updates a round needs."""
        return max(1, round(len(self.members(round_index)) * self.participation))

    def asked(self, round_index: int) -> int:
        """Return the number of clients that are asked in a round."""
        needed = self.needed(round_index)
        return needed if self.network is None else self.network.selected(needed, len(self.members(round_index)))

    @property
    def distinct_rounds(self) -> range:
        """The rounds that may differ in who takes part: all, or the first alone if nobody joins or leaves."""
        return range(1 if self.population is None else self.rounds)

    def to_toml(self) -> str:
        return toml.write(self)

    def public_toml(self) -> str:
        """Return it without its faults: what is wrong on purpose stands in a store as truth, and only there."""
        return msgspec.structs.replace(self, faults=()).to_toml()

    def digest(self) -> str:
        """Return a digest that is the same for equal experiments; it identifies the saved state of an experiment."""
        try:
            text = self.to_toml()
        except ConfigError:  # objects of the user's own: by what they say of themselves
            text = repr(self)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=8)
def _node_names(clients: int) -> tuple[str, ...]:
    return tuple(f"c{index}" for index in range(clients))


def kinds_of(classes: tuple[type, ...]) -> dict[str, type]:
    return {kind_of(cls.__name__): cls for cls in classes}


CHOICES: dict[str, dict[str, type]] = {
    "dataset": kinds_of(datasets.DATASETS),
    "partition": kinds_of(PARTITIONS),
    "model": kinds_of(MODELS),
    "loss": kinds_of(LOSSES),
    "topology": kinds_of(TOPOLOGIES),
    "aggregator": kinds_of(AGGREGATORS),
    "compression": kinds_of(COMPRESSIONS),
    "privacy": kinds_of(PRIVACY),
}


PARTS: dict[str, type] = {"local": Local, "evaluation": Evaluation, "network": Network, "population": Population}
PARTS |= {"secure_aggregation": SecureAggregation, "parameters": Parameters}
SCALARS: dict[str, type] = {"name": str, "test_share": float, "participation": float}
SCALARS |= dict.fromkeys(("clients", "rounds", "seed", "repeats"), int)


METHODS = {
    "partition": ("parts", "an object with parts(dataset, clients, least, generator)"),
    "model": ("build", "lab.Own(factory) for a function that makes your nn.Module"),
    "topology": ("round", "an object with check(experiment) and round(federation); see examples/gossip.py"),
    "aggregator": ("begin", "an object with begin(server, memory, weights)"),
    "loss": ("of_batch", "a loss of your own that derives from lab.losses.Loss"),
    "compression": ("encode", "an object with encode and decode"),
}


def _resolve_kind(field: str, value: Any, kinds: dict[str, type]) -> Any:
    """Return the description for a kind's name, a table or a description; a user's own object is returned unchanged."""
    if value is None and field in ("compression", "loss", "privacy"):
        return None
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, dict):
        return toml.decode_kind(field, value, kinds)
    _check_object(field, value, kinds)
    return toml.check_types(value, field)


def _check_object(field: str, value: Any, kinds: dict[str, type]) -> None:
    """Raise ConfigError, with the likely intention, for a class that was not called, a function or a pair of arrays."""
    known = ", ".join(sorted(kinds))
    if isinstance(value, type):
        raise ConfigError(
            f"The experiment's {field} is the class {value.__name__}, not called: write {value.__name__}()."
        )
    if field == "dataset" and not isinstance(value, (Arrays, *kinds.values())):
        raise ConfigError(f"The experiment's dataset is {type(value).__name__}. Known: {known}; or lab.Arrays(x, y).")
    if field == "privacy" and not isinstance(value, tuple(kinds.values())):
        raise ConfigError(f"The experiment's privacy is {type(value).__name__}. Known: {known}.")
    if field == "faults" and not isinstance(value, Fault):
        raise ConfigError(f"A fault of the experiment is {type(value).__name__}. Known: {known}.")
    method, meant = METHODS.get(field, ("", ""))
    if method and not hasattr(value, method):
        raise ConfigError(f"The experiment's {field} is {type(value).__name__}. Known: {known}; or {meant}.")


def _resolve_part(field: str, value: Any, part: type) -> Any:
    if value is None and field in ("network", "population", "secure_aggregation", "parameters"):
        return None
    if isinstance(value, dict):
        checks = {Local: _check_local_table, Population: _check_population_table, Parameters: _check_parameters_table}
        return toml.decode(part, checks[part](value) if part in checks else value, field)
    if not isinstance(value, part):
        raise ConfigError(f"The experiment's {field} is a lab.{part.__name__}(...) or a table; got {value!r}.")
    try:
        return toml.check_types(value, field)
    except TypeError as error:  # something inside that no description holds, such as torch.optim.Adam
        raise ConfigError(
            f"The experiment's {field} cannot be read: {error}. Optimizers: lab.adam(), lab.sgd(), lab.plain_sgd()."
        ) from None


def _check_local_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of local training with its nested parts checked; an optimizer without a kind is the default
    one.
    """
    table = dict(table)
    optimizer = table.get("optimizer")
    if isinstance(optimizer, str | dict):
        usual = kind_of(type(Local().optimizer).__name__)
        described = {"kind": optimizer} if isinstance(optimizer, str) else {"kind": usual, **optimizer}
        table["optimizer"] = msgspec.to_builtins(toml.decode_kind("optimizer", described, kinds_of(OPTIMIZERS)))
    schedule = table.get("schedule")
    if isinstance(schedule, str | dict):
        described = {"kind": schedule} if isinstance(schedule, str) else schedule
        table["schedule"] = msgspec.to_builtins(toml.decode_kind("schedule", described, kinds_of(SCHEDULES)))
    if isinstance(table.get("clip"), dict):
        table["clip"] = msgspec.to_builtins(toml.decode(Clip, table["clip"], "clip"))
    return table


def _check_parameters_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of parameters with its adapters checked."""
    adapters = table.get("adapters")
    if not isinstance(adapters, str | dict):
        return table
    described = {"kind": adapters} if isinstance(adapters, str) else adapters
    return {**table, "adapters": msgspec.to_builtins(toml.decode_kind("adapters", described, kinds_of(ADAPTERS)))}


def _check_population_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a population with the kinds of its changes checked."""
    changes = table.get("changes")
    if not isinstance(changes, list | tuple) or not all(isinstance(change, dict) for change in changes):
        return table
    kinds = kinds_of(CHANGES)
    decoded = [msgspec.to_builtins(toml.decode_kind("changes", change, kinds)) for change in changes]
    return {**table, "changes": decoded}


def read(text: str, changes: dict[str, Any] | None = None) -> Experiment:
    """Read an experiment from TOML.

    Args:
        text: The TOML.
        changes: Settings by dotted names, such as {"local.batch": 32}, which take precedence.

    Returns:
        The experiment.

    Raises:
        ConfigError: A key or a value is unknown, with what was probably meant.
    """
    table = toml.parse(text)
    for name, value in (changes or {}).items():
        toml.set_key(table, name, value)
    known = [field.name for field in msgspec.structs.fields(Experiment)]
    for key in table:
        if key not in known:
            raise ConfigError(unknown("key of experiment", key, known))
    return Experiment(**table)
