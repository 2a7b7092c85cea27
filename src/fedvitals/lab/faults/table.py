# SPDX-License-Identifier: Apache-2.0
"""The list of all faults, and one function for each hook of a training at which faults can act.

For healthy clients the cost is a look at a short list (`any_active`). A fault's random numbers depend on (seed, its
kind and position in the list, round, node); those of data faults do not depend on the round, so that a client's wrong
labels stay the same.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.tasks import Node, Update
from fedvitals.lab.faults import backdoors, colluding, data, federation, language, links, training, updates
from fedvitals.lab.faults.fault import Fault, ModelHistory, SampleForm, layer_name, missing_layer_message
from fedvitals.lab.losses import TARGETS
from fedvitals.lab.state import StateLayout
from fedvitals.lab.streams import stream

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.local import Local
    from fedvitals.lab.network.virtual_clock import Journey

MODULES = (data, training, updates, colluding, backdoors, links, federation, language)
FAULTS: tuple[type[Fault], ...] = tuple(fault for module in MODULES for fault in module.FAULTS)
Faults = Sequence[Fault]
NAMED = 12  # nodes that a message lists before it gives only the first and the last
SERVER = "server"


@functools.cache
def _overrides(kind: type[Fault], hook: str) -> bool:
    return getattr(kind, hook) is not getattr(Fault, hook)


def any_overrides(hook: str, faults: Faults) -> bool:
    """Return whether a fault acts at this hook on anybody."""
    return any(_overrides(type(fault), hook) for fault in faults)


def active_faults(hook: str, faults: Faults, round_index: int, node: Node) -> list[tuple[int, Fault]]:
    """Return the faults that act at this hook on a node in a round, as they act there, with their positions in the
    list.
    """
    return [
        (place, fault.in_round(round_index).on_node(node))
        for place, fault in enumerate(faults)
        if _overrides(type(fault), hook) and fault.active(round_index, node)
    ]


def any_active(hook: str, faults: Faults, round_index: int, node: Node) -> bool:
    """Return whether a fault acts at this hook on this node in this round."""
    return any(_overrides(type(fault), hook) and fault.active(round_index, node) for fault in faults)


def _stream(seed: int, place: int, fault: Fault, *coordinates: object) -> torch.Generator:
    return stream(seed, f"fault/{kind_of(type(fault).__name__)}/{place}", *coordinates)


# -- before the first round -------------------------------------------------------------------------------------------


def apply_experiment(experiment: Experiment) -> Experiment:
    """Return the experiment with its configuration faults applied."""
    for fault in experiment.faults:
        experiment = fault.experiment(experiment)
    return experiment


def apply_initial(faults: Faults, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Apply the faults of the initial global model, in place."""
    for place, fault in enumerate(faults):
        if _overrides(type(fault), "initial"):
            fault.initial(tensors, _stream(seed, place, fault))


def names_nodes_only(fault: Fault, nodes: Sequence[Node]) -> bool:
    """Return whether a fault names clients or the server, and no group of clients."""
    return fault.nodes == "all" or {*fault.nodes} <= {*nodes, SERVER}


def name_members(fault: Fault, groups: Mapping[str, Sequence[Node]]) -> Fault:
    """Return the fault with the members of a group, such as an edge, in place of the group's name."""
    if fault.nodes == "all":
        return fault
    nodes = (member for node in fault.nodes for member in groups.get(node, (node,)))
    return msgspec.structs.replace(fault, nodes=tuple(dict.fromkeys(nodes)))


def has_target(fault: Fault) -> bool:
    """Return whether it is an attack whose success can be measured."""
    return _overrides(type(fault), "triggered")


def history_length(faults: Faults) -> int:
    """Return how many earlier server models must be kept for the faults."""
    return max((fault.history_rounds for fault in faults), default=0)


# -- a client's training ----------------------------------------------------------------------------------------------


def apply_data(
    faults: Faults,
    round_index: int,
    node: Node,
    x: Tensor,
    y: Tensor,
    classes: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return a client's samples and labels with its data faults applied. They depend on `active_faults("data", ...)`
    only.
    """
    for place, fault in active_faults("data", faults, round_index, node):
        x, y = fault.data(x, y, classes, _stream(seed, place, fault, node))
    return x, y


def apply_order(faults: Faults, round_index: int, node: Node, order: Tensor, samples: int, seed: int) -> Tensor:
    """Return the indices of a client's mini-batches, [steps, batch], with faults of its data loading applied."""
    for place, fault in active_faults("order", faults, round_index, node):
        order = fault.order(order, samples, _stream(seed, place, fault, node))
    return order


def apply_local(faults: Faults, round_index: int, node: Node, settings: Local) -> Local:
    """Return the settings that the client trains with in a round."""
    settings = settings.at(round_index)
    for _, fault in active_faults("local", faults, round_index, node):
        settings = fault.local(settings)
    return settings


def apply_state(faults: Faults, round_index: int, node: Node, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Apply faults in place to the state that the client starts from."""
    for place, fault in active_faults("state", faults, round_index, node):
        fault.state(tensors, _stream(seed, place, fault, round_index, node))


def gradient_fault(
    faults: Faults,
    round_index: int,
    node: Node,
    seed: int,
) -> Callable[[Mapping[str, Tensor], int], None] | None:
    """Return the function to call with the gradients and the index of each step, or None if no fault alters them."""
    gradient_faults = active_faults("gradient", faults, round_index, node)
    if not gradient_faults:
        return None

    def spoil(gradients: Mapping[str, Tensor], step: int) -> None:
        for place, fault in gradient_faults:
            fault.gradient(gradients, step, _stream(seed, place, fault, round_index, node, step))

    return spoil


def apply_step(faults: Faults, round_index: int, node: Node, step: int) -> None:
    """Apply faults that act before a local iteration; may raise."""
    if faults:
        for _, fault in active_faults("step", faults, round_index, node):
            fault.step(step)


def apply_scale(faults: Faults, round_index: int, node: Node, scale: float) -> float:
    """Return the α/r with which a client computes its adapters."""
    for _, fault in active_faults("scale", faults, round_index, node):
        scale = fault.scale(scale)
    return scale


def telemetry_is_lost(faults: Faults, round_index: int, node: Node) -> bool:
    """Return whether the telemetry of this client is lost."""
    return any(fault.drops_telemetry and fault.active(round_index, node) for fault in faults)


# -- what it sends ----------------------------------------------------------------------------------------------------


def apply_update(faults: Faults, round_index: int, update: Update, past: ModelHistory, seed: int) -> None:
    """Apply faults to the update that a client sends, unless the client failed."""
    if not faults or update.error is not None:
        return
    for place, fault in sorted(
        active_faults("update", faults, round_index, update.node), key=lambda entry: entry[1].applied_last
    ):
        fault.update(update, past, _stream(seed, place, fault, round_index, update.node))


def any_collusion(faults: Faults, round_index: int) -> bool:
    """Return whether a fault needs all updates of this round at once."""
    return any(_overrides(type(fault), "collude") and fault.active_in_round(round_index) for fault in faults)


def apply_collusion(faults: Faults, round_index: int, updates: Sequence[Update], past: ModelHistory, seed: int) -> None:
    """Apply colluding faults to the updates of a whole cohort, after `apply_update` on each of them."""
    for place, fault in enumerate(faults):
        if _overrides(type(fault), "collude"):
            affected = [update.node for update in updates if fault.active(round_index, update.node)]
            if affected:
                fault.in_round(round_index).collude(updates, affected, past, _stream(seed, place, fault, round_index))


def apply_journey(faults: Faults, round_index: int, journey: Journey, seed: int) -> Journey:
    """Return a client's journey through the network with faults applied."""
    for place, fault in active_faults("journey", faults, round_index, journey.node):
        journey = fault.journey(journey, _stream(seed, place, fault, round_index, journey.node))
    return journey


def apply_server(faults: Faults, round_index: int, before: Tensor, after: Tensor, weights: int) -> Tensor:
    """Return the server's new model with faults applied."""
    for _, fault in active_faults("server", faults, round_index, SERVER):
        after = fault.server(before, after, weights)
    return after


# -- whether it can be meant ------------------------------------------------------------------------------------------


def check_fault(
    fault: Fault,
    nodes: Sequence[Node],
    layout: StateLayout,
    iterations: int | None,
    rounds: int,
    classes: int | None = None,
    samples: SampleForm | None = None,
) -> None:
    """Raise ConfigError, with the valid choices, if a fault names something that this run does not have.

    `nodes` are the clients and the names of their groups, `layout` is the model's, `iterations` those of a
    client-round, where known.
    """
    kind = kind_of(type(fault).__name__)
    trained = layout.names[: layout.trained]
    known = [SERVER] if fault.strikes == "server" else [*nodes]
    for node in () if fault.nodes == "all" else fault.nodes:
        _check_node(node, known, kind)
    peer = getattr(fault, "of", None)
    if peer is not None:
        _check_node(peer, known, kind)
    if fault.since >= rounds:
        raise ConfigError(f"The fault {kind} begins in round {fault.since}; the run has the rounds 0 to {rounds - 1}.")
    step = getattr(fault, "at_step", None)
    if step is not None and iterations is not None and step >= iterations:
        raise ConfigError(f"The fault {kind} waits for step {step}; a client-round has steps 0 to {iterations - 1}.")
    layer = getattr(fault, "layer", None)
    if layer is not None and layer_name(trained, layer) is None:
        raise ConfigError(missing_layer_message(layer, trained, kind))
    if hasattr(fault, "check_tensors"):
        fault.check_tensors(layout.names)
    if classes is not None and hasattr(fault, "check_classes"):
        if samples is not None and samples.targets != "classes":
            raise ConfigError(f"The fault {kind} is about classes, but the targets are {TARGETS[samples.targets]}.")
        fault.check_classes(classes)
    if samples is not None and hasattr(fault, "check_samples"):
        fault.check_samples(samples)


def _check_node(node: Node, known: Sequence[Node], kind: str) -> None:
    if node in known:
        return
    shown = ", ".join(known) if len(known) <= NAMED else f"{known[0]} to {known[-1]}"
    close = difflib.get_close_matches(node, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise ConfigError(f"There is no node '{node}' for the fault {kind}. Known: {shown}.{hint}")
