# SPDX-License-Identifier: Apache-2.0
"""Apply the monitor's corrections to a Flower run: to replies, and to the model.

Only if the user requested it with `Monitor(cure="auto")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fedvitals.diagnosis.corrections.followed import TENSOR_KINDS, CorrectionsInForce, FollowedCorrections, RobustRule
from fedvitals.hosts import array_models
from fedvitals.hosts.array_models import Values
from fedvitals.hosts.flower import arrays
from fedvitals.probes.backends import torch_is_installed
from fedvitals.protocols import Observer
from fedvitals.records import Action

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATION_KINDS = ("server_rate", "robust_aggregator", "roll_back")


class FlowerCorrections(FollowedCorrections[ArrayRecord]):
    """The corrections of a Flower server."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(observer, self._obstacle_to)
        self.aggregates = False  # whether the server's aggregate passes through our hooks

    def _obstacle_to(self, action: Action) -> str | None:
        if action.kind in TENSOR_KINDS and not torch_is_installed():
            return f"'{action.kind}' needs torch, which is not installed: pip install 'fedvitals[torch]'."
        if not self.aggregates and (action.kind in AGGREGATION_KINDS or "restore" in action.arguments):
            return f"'{action.kind}' needs a strategy of flwr.serverapp that is attached: it aggregates."
        return None


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
    if in_force.max_update_norm is not None and model is not None and [*start] == [*got]:
        import torch  # noqa: PLC0415 - for corrections alone

        change = array_models.difference_of(start, got).tensors()
        norm = float(torch.linalg.vector_norm(change.vector.double()))
        if norm > in_force.max_update_norm:  # a non-finite update is left unchanged, so that others can see it
            share = in_force.max_update_norm / norm
            shorter = {n: torch.tensor(start[n]) + c * share for n, c in zip(got, change, strict=True)}
            key = next(k for k, record in reply.content.items() if record is model)
            reply.content[key] = arrays.arrays_like(model, shorter, layers)
    for record in reply.content.values():
        if isinstance(record, MetricRecord) and weight in record:
            claimed = in_force.samples.get(node, record[weight])
            factor = in_force.factors.get(node, 1.0)
            if not isinstance(claimed, list) and (node in in_force.samples or factor != 1.0):
                record[weight] = max(1, round(claimed * factor))


def with_robust_aggregate(
    rule: RobustRule, replies: Sequence[Message], start: Mapping[str, Tensor], layers: Sequence[str] | None
) -> list[Message]:
    """Return the replies, each with its own model replaced by the robust aggregate of all.

    The user's strategy still runs: it averages equal models, and steps from there as usual.
    """
    with_model = [(reply, arrays.model_of(reply.content)) for reply in replies if reply.has_content()]
    models = [(reply, model) for reply, model in with_model if model is not None]
    if not models:
        return [*replies]
    aggregate = rule([_flat(arrays.tensors_of(model, layers)) for _, model in models])
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
