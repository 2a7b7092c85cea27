# SPDX-License-Identifier: Apache-2.0
"""Clients that train as one batch, as a host shows them to an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Stack:
    """Clients that train together as one batch: no module of their own to hook, but all their states in one matrix.

    `states`, [clients, size], changes in place as they train: the parameters of `module` in their order, flattened one
    after the other, then its buffers; only those in `held`, if it is given. `samples(n)` gives n of each client's own
    samples, [clients, n, ...], and labels.
    """

    nodes: Sequence[str]
    groups: Sequence[str | None]
    module: Any  # names, shapes and the forward pass; its own numbers mean nothing
    states: Any
    samples: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Any] | None = None
    labels: Sequence[Any] | None = None  # each client's own, all of them
    silent: Sequence[str] = ()  # who trains along, and of whom nothing that is measured gets home
    steps: Sequence[int] | None = None  # each one's own number, where they differ: who is done rests, in the matrix too
    # The host's own quick way from states [clients, size] and samples [clients, n, ...] to outputs [clients, n, ...],
    # differentiable by both; None: the module is applied to each client's part.
    forward: Callable[[Any, Any], Any] | None = None
    # Nine sums of every step's gradients so far, [steps, clients, layers, 9] on the device, where the host records them
    # itself on its way; None: whoever watches measures in `stack_step`.
    sums: Callable[[], Any] | None = None
    inputs: Sequence[Any] | None = None  # each client's own, all of them, as `labels`
    held: Sequence[str] | None = None  # names of the tensors in `states`; the others are the module's own, for all
    # What the training computed by step, where its loss is a cross-entropy of single labels: logits [clients, n, ...,
    # classes] and labels [clients, n, ...]. Needed of every step in a client's first pass over its samples, or in its
    # last. None: training losses are not measured.
    outputs: Callable[[], Mapping[int, tuple[Any, Any]]] | None = None
    # The optimiser's settings and the size of a batch, by metric: a number for all clients, or one for each.
    settings: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
