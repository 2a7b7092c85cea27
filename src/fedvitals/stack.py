# SPDX-License-Identifier: Apache-2.0
"""Clients that train as one batch, as a host presents them to an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Stack:
    """Clients that train together as one batch: they have no modules to hook, but all their states are in one matrix.

    `states`, [clients, size], changes in place as they train: the parameters of `module` in order, each flattened, then
    its buffers; only those in `held`, if given. `samples(n)` returns n of each client's own samples, [clients, n, ...],
    and labels.
    """

    nodes: Sequence[str]
    groups: Sequence[str | None]
    module: Any  # names, shapes and the forward pass; its own values are not used
    states: Any
    samples: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Any] | None = None
    labels: Sequence[Any] | None = None  # all labels of each client
    silent: Sequence[str] = ()  # clients that train in the batch, but none of whose measurements arrive
    steps: Sequence[int] | None = None  # each client's own number, if they differ; idle rows stay in the matrix
    # The host's fast function from states [clients, size] and samples [clients, n, ...] to outputs [clients, n, ...],
    # differentiable in both; None: the module is applied to each client's part.
    forward: Callable[[Any, Any], Any] | None = None
    # Nine sums of every step's gradients so far, [steps, clients, layers, 9] on the device, if the host records them
    # itself; None: the observer measures them in `stack_step`.
    sums: Callable[[], Any] | None = None
    inputs: Sequence[Any] | None = None  # all inputs of each client, as in `labels`
    held: Sequence[str] | None = None  # names of the tensors in `states`; the others are shared, as in the module
    # Results of the training by step, if its loss is a cross-entropy of single labels: logits [clients, n, ...,
    # classes] and labels [clients, n, ...]. Needed for every step in a client's first pass over its samples, or in its
    # last. None: training losses are not measured.
    outputs: Callable[[], Mapping[int, tuple[Any, Any]]] | None = None
    # The optimiser's settings and the batch size, by metric: one number for all clients, or one each.
    settings: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
