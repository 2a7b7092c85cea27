# SPDX-License-Identifier: Apache-2.0
"""Apply the monitor's corrections to a Flower run: to replies, and to the model.

Only where the user asked for it, `Monitor(cure="auto")`. Clients train by their own code, so corrections that would
have to happen there (gradient clipping, another learning rate) are refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fedvitals.diagnosis.corrections.catalog import positive_argument, target_of
from fedvitals.diagnosis.corrections.correction_trials import FIRST_MODEL
from fedvitals.errors import ConfigError
from fedvitals.hosts import array_models
from fedvitals.hosts.array_models import Values
from fedvitals.hosts.flower import arrays
from fedvitals.probes.backends import torch_is_installed
from fedvitals.protocols import Observer
from fedvitals.records import Action

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class CorrectionsInForce:
    """The corrections in force in one round; by default none."""

    quarantined: set[str] = field(default_factory=set)
    factors: dict[str, float] = field(default_factory=dict)  # of a client's weight
    samples: dict[str, int] = field(default_factory=dict)  # instead of what it claims
    longest: float | None = None  # norm of an update
    server_rate: float = 1.0
    robust: Any = None  # an aggregator of the lab

    @property
    def of_replies(self) -> bool:
        """Return whether any correction changes replies."""
        return bool(self.factors or self.samples or self.longest is not None)


def quarantine(in_force: CorrectionsInForce, action: Action) -> None:
    """Leave the client's updates out."""
    in_force.quarantined.add(target_of(action, "a client"))


def reweight(in_force: CorrectionsInForce, action: Action) -> None:
    """Change the client's sample count, or multiply its weight by a factor."""
    node = target_of(action, "a client")
    if "samples" in action.arguments:
        in_force.samples[node] = int(action.arguments["samples"])
    else:
        in_force.factors[node] = in_force.factors.get(node, 1.0) * positive_argument(action, "factor")


def clip_updates(in_force: CorrectionsInForce, action: Action) -> None:
    """Limit the norm of updates."""
    in_force.longest = positive_argument(action, "norm")


def server_rate(in_force: CorrectionsInForce, action: Action) -> None:
    """Multiply the server's step by a factor."""
    in_force.server_rate *= positive_argument(action, "factor")


def robust_aggregator(in_force: CorrectionsInForce, action: Action) -> None:
    """Aggregate with a robust rule of the lab."""
    from fedvitals.lab.corrections import robust_rule  # noqa: PLC0415 - loads the lab, which others do not need

    in_force.robust = robust_rule(action)


def roll_back(in_force: CorrectionsInForce, action: Action) -> None:
    """Do nothing here: restoring the model is all."""


KINDS: Mapping[str, Callable[[CorrectionsInForce, Action], None]] = {
    function.__name__: function
    for function in (quarantine, reweight, clip_updates, server_rate, robust_aggregator, roll_back)
}


TORCH_KINDS = ("clip_updates", "server_rate", "robust_aggregator")  # corrections that compute with tensors
AGGREGATION_KINDS = ("server_rate", "robust_aggregator", "roll_back")


class FlowerCorrections:
    """Applies prescribed actions: `in_force` are those of the open round, `restored` the model that it begins from."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._kept: dict[int, ArrayRecord] = {}
        self._gone_back: set[str] = set()
        self._begun = False
        self.in_force = CorrectionsInForce()
        self.restored: ArrayRecord | None = None
        self.aggregates = False  # whether what the server makes of the replies passes through our hands

    def follow(self, actions: Iterable[Action], round_index: int, model: ArrayRecord | None) -> None:
        """Set the corrections of a round. `model`: the one that the round begins with, kept as a checkpoint."""
        self.in_force, self.restored = CorrectionsInForce(), None
        for action in actions:
            if action.kind == "checkpoint":
                if model is not None:
                    self._kept[round_index - 1] = model
                    if not self._begun:  # rounds are counted from 1 here
                        self._kept[FIRST_MODEL], self._begun = model, True
                self._kept = {held: kept for held, kept in self._kept.items() if held in action.arguments["keep"]}
                continue
            try:
                self._apply(action)
            except ConfigError as error:
                self._observer.refused(action, str(error))

    def _apply(self, action: Action) -> None:
        apply = KINDS.get(action.kind)
        if apply is None:
            raise ConfigError(f"'{action.kind}' is up to the clients, which train by code of their own in Flower.")
        if action.kind in TORCH_KINDS and not torch_is_installed():
            raise ConfigError(f"'{action.kind}' needs torch, which is not installed: pip install 'fedvitals[torch]'.")
        if not self.aggregates and (action.kind in AGGREGATION_KINDS or "restore" in action.arguments):
            raise ConfigError(f"'{action.kind}' needs a strategy of flwr.serverapp that is attached: it aggregates.")
        name = str(action.arguments.get("id", action.at))
        if "restore" in action.arguments and name not in self._gone_back:
            round_index = int(action.arguments["restore"])
            if round_index not in self._kept:
                held = ", ".join(map(str, sorted(self._kept))) or "none"
                raise ConfigError(f"There is no checkpoint of round {round_index}. Kept: {held}.")
            self.restored = self._kept[round_index]
            self._gone_back.add(name)
        apply(self.in_force, action)


def correct_reply(
    in_force: CorrectionsInForce,
    node: str,
    reply: Message,
    start: Mapping[str, Values],
    got: Mapping[str, Values],
    weight: str,
    layers: Any,
) -> None:
    """Apply the corrections to a reply in place: the length of its update, and its weight."""
    model = arrays.model_of(reply.content)
    if in_force.longest is not None and model is not None and [*start] == [*got]:
        import torch  # noqa: PLC0415 - for corrections alone

        change = array_models.difference_of(start, got).tensors()
        norm = float(torch.linalg.vector_norm(change.vector.double()))
        if norm > in_force.longest:  # what is not finite stays what it is: others shall see it
            shorter = {
                n: torch.tensor(start[n]) + c * (in_force.longest / norm) for n, c in zip(got, change, strict=True)
            }
            key = next(k for k, record in reply.content.items() if record is model)
            reply.content[key] = arrays.arrays_like(model, shorter, layers)
    for record in reply.content.values():
        if isinstance(record, MetricRecord) and weight in record:
            claimed = in_force.samples.get(node, record[weight])
            factor = in_force.factors.get(node, 1.0)
            if not isinstance(claimed, list) and (node in in_force.samples or factor != 1.0):
                record[weight] = max(1, round(claimed * factor))


def with_robust_aggregate(
    rule: Any, replies: Sequence[Message], start: Mapping[str, Tensor], layers: Sequence[str] | None
) -> list[Message]:
    """Return the replies, each with the robust aggregate of all in place of its own model.

    The user's strategy still runs: it averages equal models, and steps from there as it always does.
    """
    with_model = [(reply, arrays.model_of(reply.content)) for reply in replies if reply.has_content()]
    models = [(reply, model) for reply, model in with_model if model is not None]
    if not models:
        return [*replies]
    before = _flat(start)
    total = rule.begin(before, {}, len(before))
    for reply, model in models:
        total.add(_flat(arrays.tensors_of(model, layers)), 1.0, str(reply.metadata.src_node_id))
    aggregate = total.finish()
    parts = aggregate.split([t.numel() for t in start.values()])
    tensors = {name: part.view(t.shape) for (name, t), part in zip(start.items(), parts, strict=True)}
    for reply, model in models:
        key = next(k for k, record in reply.content.items() if record is model)
        reply.content[key] = arrays.arrays_like(model, tensors, layers)
    return [*replies]


def scaled_server_step(
    rate: float, before: ArrayRecord, after: ArrayRecord, layers: Sequence[str] | None
) -> ArrayRecord:
    """Return the new model with the server's step multiplied by a rate."""
    start, end = arrays.tensors_of(before, layers), arrays.tensors_of(after, layers)
    return arrays.arrays_like(after, {n: start[n] + (end[n] - start[n]) * rate for n in end if n in start}, layers)


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    import torch  # noqa: PLC0415 - for corrections alone

    return torch.cat([t.reshape(-1).float() for t in tensors.values()]) if tensors else torch.zeros(0)
