# SPDX-License-Identifier: Apache-2.0
"""The base class of faults: which nodes a fault affects, in which rounds, and the hooks of a training where it can act.

A fault overrides one hook, rarely two; a hook that is not overridden costs nothing (`table.any_active`). A fault has no
state: all it knows is passed to its hook, so that a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, cast, get_type_hints

import msgspec
import torch
from torch import Tensor

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, kind_of, require
from fedvitals.lab.engines.tasks import Node, Update

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.local import Local
    from fedvitals.lab.network.virtual_clock import Journey

Family = Literal["convergence", "client", "aggregation", "gradient", "system"]
Layer = int | str
"""A tensor by the model's own name («0.weight»), or by its place among the weight tensors: 0 the first, -1 the last."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """The form of a data set's samples: the shape of one, whether it consists of tokens, and the kind of its targets
    (see `Dataset.targets`).
    """

    shape: tuple[int, ...]
    tokens: bool = False
    targets: str = "classes"


class ModelHistory(Protocol):
    """The server's recent models, which every client has received, and its aggregation rule."""

    weights: int  # how much of a state is trained; the rest are buffers, which a fault in an update leaves alone

    @property
    def server_learning_rate(self) -> float:
        """The factor by which the rule multiplies the mean change; 1 where it has no such setting."""
        ...

    def model(self, rounds_ago: int) -> Tensor | None:
        """Return the server's model at the start of this round (0) or of an earlier one, or None before the first."""
        ...

    def aggregate(self, updates: Sequence[Update]) -> Tensor:
        """Return what the server's rule would make of these updates; its own state stays as it is."""
        ...


def _with_shared_arguments(docstring: str | None) -> str:
    """Return a fault's docstring with the parameters that all faults take, which `help` would not show otherwise."""
    own, shared = inspect.cleandoc(docstring or ""), inspect.cleandoc(Fault.__doc__ or "").partition("Args:\n")[2]
    return f"{own}\n{shared}" if "\nArgs:\n" in own else f"{own}\n\nArgs:\n{shared}"


class Fault(Description, frozen=True, kw_only=True):
    """A fault of a node, or of the whole federation, in some rounds.

    Args:
        nodes: The names of the nodes that it affects, or "all".
        since: The first round.
        until: The last round; None: to the end.
        every: Its interval in rounds: with 3, it acts in rounds `since`, `since` + 3, and so on; None: in each round.
        ramp: The number of rounds over which its strength grows linearly: 1/ramp of the full strength in round `since`,
            the full strength from round `since` + `ramp` − 1 on; None: the full strength at once.
    """

    nodes: tuple[str, ...] | str
    since: int = 0
    until: int | None = None
    every: int | None = None
    ramp: int | None = None

    family: ClassVar[Family]  # that of its issue unless the class says another
    issue: ClassVar[str]  # the code in `diagnosis.issues.table`, in lower case, that a detector should name; its own
    # kind unless the class says another
    strikes: ClassVar[Literal["clients", "server", "run"]] = "clients"
    drops_telemetry: ClassVar[bool] = False  # whether what the monitor measures on the client gets lost
    applied_last: ClassVar[bool] = False  # whether it must come after all other faults of the same update
    needs_others: ClassVar[bool] = False  # whether some clients must stay unaffected
    strength_field: ClassVar[str | None] = None  # the setting that a ramp lets grow, if there is one
    harmless: ClassVar[float] = 0.0  # the value of that setting from which a ramp begins

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.__doc__ = _with_shared_arguments(cls.__doc__)
        if "issue" not in cls.__dict__:
            cls.issue = kind_of(cls.__name__)
        issue = ISSUES_BY_CODE.get(cls.issue.upper())
        if "family" not in cls.__dict__ and issue is not None:
            cls.family = cast("Family", issue.family)

    def __post_init__(self) -> None:
        name = kind_of(type(self).__name__)
        if isinstance(self.nodes, str):
            if self.nodes != "all":
                wanted = f'["{self.nodes}"] for this one node, or "all"'
                raise ConfigError(f"The nodes of {name} are a list of names; got {self.nodes!r}. Write {wanted}.")
        else:
            msgspec.structs.force_setattr(self, "nodes", tuple(self.nodes))
            require(bool(self.nodes), f"nodes of {name}", [], 'at least one name, or "all"')
        require(
            _is_whole_number(self.since) and self.since >= 0, f"first round (since) of {name}", self.since, "0 or more"
        )
        good = self.until is None or (_is_whole_number(self.until) and self.until >= self.since)
        require(good, f"last round (until) of {name}", self.until, f"{self.since} (since) or more, or left out")
        fits = self.nodes != "all" or not self.needs_others
        require(fits, f"nodes of {name}", self.nodes, "a list of some of the clients")
        self._check_growth(name)
        for field, check in _limit_checks(type(self)):
            check(self, field)

    def _check_growth(self, name: str) -> None:
        for field in ("every", "ramp"):
            value = getattr(self, field)
            good = value is None or (_is_whole_number(value) and value >= 1)
            require(good, f"number of rounds ({field}) of {name}", value, "1 or more, or left out")
        if self.ramp is not None:
            grows = self.strength_field
            require(grows is not None, f"ramp of {name}", self.ramp, "left out: it has no strength that could grow")
            has_strength = grows is not None and getattr(self, grows) is not None
            require(
                has_strength,
                f"ramp of {name}",
                self.ramp,
                f"left out, or go with a number of {grows}: that is what grows",
            )

    def active(self, round_index: int, node: Node) -> bool:
        """Return whether it affects this node in this round."""
        return self.active_in_round(round_index) and (self.nodes == "all" or node in self.nodes)

    def active_in_round(self, round_index: int) -> bool:
        """Return whether it affects any node in this round."""
        if round_index < self.since or (self.until is not None and round_index > self.until):
            return False
        return self.every is None or (round_index - self.since) % self.every == 0

    def in_round(self, round_index: int) -> Self:
        """Return the fault as it acts in this round: with the strength that its ramp has reached."""
        reached = round_index - self.since + 1
        if self.ramp is None or self.strength_field is None or reached >= self.ramp:
            return self
        whole = getattr(self, self.strength_field)
        strength = self.harmless + (whole - self.harmless) * reached / self.ramp
        return msgspec.structs.replace(self, ramp=None, **{self.strength_field: strength})

    def on_node(self, node: Node) -> Self:  # noqa: ARG002
        """Return the fault as it acts on this node, for faults that give each node another part."""
        return self

    def truth(self, nodes: Sequence[Node] = ()) -> dict[str, Any]:
        """Return the ground truth against which detectors are scored; "all" becomes the names of the federation's
        nodes.
        """
        settings = msgspec.structs.asdict(self)
        struck = settings.pop("nodes")
        if struck == "all":
            struck = tuple(nodes) or ("all",)
        about = {"kind": kind_of(type(self).__name__), "family": self.family, "issue": self.issue}
        return {**about, **settings, "nodes": list(struck)}

    @property
    def history_rounds(self) -> int:
        """The number of earlier server models that it needs."""
        return 0

    # -- the hooks ----------------------------------------------------------------------------------------------------

    def experiment(self, experiment: Experiment) -> Experiment:
        """Return the experiment with changed settings, for faults in the configuration of the whole run."""
        return experiment

    def initial(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:
        """Change the initial global model in place."""

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the samples and labels that the client trains on instead of its own."""
        return x, y

    def order(self, order: Tensor, samples: int, stream: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return the indices of the samples in each mini-batch, [steps, batch], instead of `order`."""
        return order

    def local(self, settings: Local) -> Local:
        """Return the settings that the client trains with instead of the experiment's."""
        return settings

    def scale(self, scale: float) -> float:
        """Return the α/r with which the client computes its adapters."""
        return scale

    def state(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:
        """Change the state that the client starts from, in place."""

    def gradient(self, gradients: Mapping[str, Tensor], step: int, stream: torch.Generator) -> None:
        """Change the gradients in place, after the backward pass and before clipping."""

    def step(self, step: int) -> None:
        """Act before a local iteration; may raise."""

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:
        """Change the client's outgoing update by assigning its fields. The tensors in them are shared and must not be
        modified.
        """

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        """Like `update`, but with all updates of the round at hand; `affected` names the nodes that this fault
        controls.
        """

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:  # noqa: ARG002
        """Return the client's journey through the network with the fault applied."""
        return journey

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return the test samples on which an attack is tried, and the labels that it wants; None: it has no target."""
        return None

    def server(self, before: Tensor, after: Tensor, weights: int) -> Tensor:  # noqa: ARG002
        """Return the server's new model instead of `after`; the first `weights` numbers are trained."""
        return after


class RunFault(Fault, frozen=True, kw_only=True):
    """Base class of faults in the configuration of the whole run: they affect all nodes in all rounds."""

    nodes: tuple[str, ...] | str = "all"
    strikes: ClassVar[Literal["clients", "server", "run"]] = "run"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = kind_of(type(self).__name__)
        require(self.nodes == "all", f"nodes of {name}", self.nodes, '"all": it is a setting of the whole run')
        require(self.since == 0, f"first round (since) of {name}", self.since, "0: it is a setting of the whole run")
        require(self.until is None, f"last round (until) of {name}", self.until, "left out: it lasts the whole run")
        require(self.every is None, f"every of {name}", self.every, "left out: it lasts the whole run")


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_within(fault: Fault, field: str, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raise ConfigError unless the field is a number from `low` (or `above` it) up to `high`."""
    value = getattr(fault, field)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and (value > low if above else value >= low) and value <= high and not math.isinf(value)
    start = f"above {low:g}" if above else f"{low:g} or more" if math.isinf(high) else f"from {low:g}"
    allowed = start if math.isinf(high) else f"{start} up to {high:g}"
    require(bool(fits), f"{field} of {kind_of(type(fault).__name__)}", value, f"a number, {allowed}")


def require_whole_number(fault: Fault, field: str, low: int) -> None:
    """Raise ConfigError unless the field is an integer, `low` or more."""
    value = getattr(fault, field)
    fits = _is_whole_number(value) and value >= low
    require(fits, f"{field} of {kind_of(type(fault).__name__)}", value, f"a whole number, {low} or more")


@functools.cache
def _limit_checks(kind: type[Fault]) -> tuple[tuple[str, Callable[[Fault, str], None]], ...]:
    """Return the fields of a fault whose types have limits, each with the function that checks it."""
    types = get_type_hints(kind, include_extras=True)
    return tuple((name, check) for name, field in types.items() for check in getattr(field, "__metadata__", ()))


# Types of settings with their limits, which are checked when a fault is created.
Share = Annotated[float, functools.partial(require_within, low=0, high=1, above=True)]
Positive = Annotated[float, functools.partial(require_within, low=0, above=True)]
NotNegative = Annotated[float, functools.partial(require_within, low=0)]
AtLeastOne = Annotated[float, functools.partial(require_within, low=1)]
AboveOne = Annotated[float, functools.partial(require_within, low=1, above=True)]
Index = Annotated[int, functools.partial(require_whole_number, low=0)]
Count = Annotated[int, functools.partial(require_whole_number, low=1)]
Several = Annotated[int, functools.partial(require_whole_number, low=2)]


def weight_names(names: Sequence[str]) -> list[str]:
    """Return the names of the weight tensors, first to last; layer indices refer to this list."""
    return [name for name in names if "weight" in name.rsplit(".", 1)[-1]]


def layer_name(names: Sequence[str], layer: Layer) -> str | None:
    """Return the name of the tensor that `layer` refers to, or None."""
    if isinstance(layer, str):
        return layer if layer in names else None
    weights = weight_names(names)
    return weights[layer] if -len(weights) <= layer < len(weights) else None


def missing_layer_message(layer: Layer, names: Sequence[str], kind: str) -> str:
    """Return the error message for a layer that does not exist."""
    weights = weight_names(names)
    if isinstance(layer, int):
        counted = ", ".join(f"{place} = {name}" for place, name in enumerate(weights))
        return f"There is no layer {layer} for the fault {kind}. Known, also counted from the end: {counted}."
    close = difflib.get_close_matches(layer, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"There is no layer '{layer}' for the fault {kind}. Known: {', '.join(names)}.{hint}"
