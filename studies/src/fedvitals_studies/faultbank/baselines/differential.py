# SPDX-License-Identifier: Apache-2.0
"""Compare client models on the same random inputs, without any data, to find those that respond differently.

`differential_votes` is the localisation of FedDebug (Gill et al., ICSE 2023), reimplemented from the paper: for a
random input it accuses the client without whom the others have most neurons active in common. It always accuses a given
number of clients, so it serves as a baseline only. `differential_scores` measures each client's disagreement against
the spread of the others', so that nobody may be accused and the number is an outcome. Both detect much only where
clients train long between two rounds: after a few steps, their models respond alike. A host's observer calls either in
its `updates(round, deltas)`, with `states_of(global model, deltas)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedvitals.errors import ConfigError
from fedvitals.probes.view import evaluation_without_gradients
from fedvitals.protocols import Node
from fedvitals.stats import Array

# What has neurons: the published tool looks at two-dimensional convolutions and dense layers; the rest are ours.
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.LSTM, nn.GRU, nn.RNN)
_FEWEST = 4  # clients, below which the spread of the others is meaningless
_UNITY = 4  # power of the others' share
_LEAST_SPREAD = 0.2  # of a logarithm: where nearly all answer alike, a single neuron must not accuse
_NEURONS = 16384  # looked at in a disagreement, over all inputs
_DRAWS = 20_000  # of healthy cohorts, used for a limit


def states_of(module: nn.Module, deltas: Mapping[Node, Sequence[Tensor]]) -> dict[Node, Tensor]:
    """Return each client's parameters as one vector: the global model's plus the client's change."""
    start = torch.cat([p.detach().reshape(-1).float() for p in module.parameters()])
    return {node: start + torch.cat([d.detach().reshape(-1).float() for d in delta]) for node, delta in deltas.items()}


def differential_votes(
    module: nn.Module,
    states: Mapping[Node, Tensor],
    shape: Sequence[int],
    *,
    inputs: int = 10,
    threshold: float = 0.003,
    seed: int = 0,
    culprits: int = 1,
) -> dict[Node, int]:
    """Return how many of the random inputs accuse each client, when so many culprits are searched for (FedDebug).

    `states` are the parameters of each client as one vector (buffers may follow; else they are the module's own).
    `shape` is that of a sample. Ties are broken at random.
    """
    answers = random_answers(module, states, shape, inputs=inputs, seed=seed)
    return votes_of([*states], elimination_order(answers, culprits, threshold=threshold, seed=seed), culprits)


def votes_of(nodes: Sequence[Node], order: Tensor, culprits: int) -> dict[Node, int]:
    """Return the votes for a number of culprits, from the order in which each input eliminates clients."""
    counts = torch.bincount(order[:, :culprits].reshape(-1), minlength=len(nodes))
    return dict(zip(nodes, counts.tolist(), strict=True))


def elimination_order(answers: Tensor, most: int, *, threshold: float = 0.003, seed: int = 0) -> Tensor:
    """Return [inputs, most]: whom each input eliminates first, second, ..., from outputs [clients, inputs, neurons].

    A search for fewer culprits is the start of a search for more, so one order serves every number.
    """
    generator = torch.Generator().manual_seed(seed)
    clients, inputs = answers.shape[:2]
    order = torch.empty(inputs, min(most, clients - 1), dtype=torch.long)
    for question in range(inputs):
        silent = ~(answers[:, question] > threshold)  # NaN is silent: such a client shares no neuron with any other
        silences = silent.sum(0, dtype=torch.int32)
        left = torch.ones(clients, dtype=torch.bool)
        for place in range(order.shape[1]):
            # Without client i, common is what was common to all, and what i alone kept from being so.
            gained = silent[:, silences == 1].sum(1).double()
            gained += torch.rand(clients, generator=generator)  # under one neuron: decides between equals only
            chosen = int(gained.masked_fill(~left, -1.0).argmax())
            order[question, place], left[chosen] = chosen, False
            silences -= silent[chosen].int()
    return order


@dataclass(frozen=True, slots=True)
class Differential:
    """How far each client's outputs are from the others', and whether that is more than chance."""

    scores: Mapping[Node, float]  # robust standard deviations of the clients' own disagreement
    limit: float  # exceeded by the largest score of a healthy cohort of this size at the requested rate
    accused: tuple[Node, ...]  # all above the limit, the worst first: () means nobody


def differential_scores(
    module: nn.Module,
    states: Mapping[Node, Tensor],
    shape: Sequence[int],
    *,
    inputs: int = 10,
    seed: int = 0,
    false_alarms: float = 0.01,
) -> Differential:
    """Return which clients disagree with the others more than these do among themselves.

    `false_alarms` is the rate, per round, at which a client of a healthy cohort may be accused, if the logarithms of
    its clients' disagreements are normal. With fewer than four clients nobody is accused.
    """
    return score_answers([*states], random_answers(module, states, shape, inputs=inputs, seed=seed), false_alarms)


def score_answers(nodes: Sequence[Node], answers: Tensor, false_alarms: float = 0.01) -> Differential:
    """Return the same from outputs [clients, inputs, neurons]."""
    if len(nodes) < _FEWEST:
        return Differential(dict.fromkeys(nodes, 0.0), math.inf, ())
    scores = robust_scores(np.log(disagreement(answers)))
    limit = healthy_limit(len(nodes), false_alarms)
    worst_first = sorted(zip(-scores, nodes, strict=True))
    accused = tuple(node for score, node in worst_first if -score > limit)
    return Differential(dict(zip(nodes, scores.tolist(), strict=True)), limit, accused)


def disagreement(answers: Tensor, threshold: float = 0.003) -> Array:
    """Return each client's number of neurons that are silent where the others are active, or active where they are
    silent.

    A neuron counts more the more united the others are: their share to the fourth power, so that a second culprit does
    not hide the first. One is added, so that the result has a logarithm.
    """
    flat = answers.reshape(len(answers), -1)
    active = (flat[:, :: max(1, flat.shape[1] // _NEURONS)] > threshold).double()  # of very many, some are enough
    others = (active.sum(0) - active) / (len(active) - 1)
    against = torch.where(active > 0, 1 - others, others) ** _UNITY
    return 1.0 + np.asarray(against.sum(1))


def robust_scores(values: Array) -> Array:
    """Return how far each of [..., clients] is above the median of the *others*, in their robust standard
    deviations.
    """
    clients = values.shape[-1]
    others = np.stack([np.delete(values, i, axis=-1) for i in range(clients)], axis=-2)
    middle = np.median(others, axis=-1)
    spread = 1.4826 * np.median(np.abs(others - middle[..., None]), axis=-1)
    return np.asarray((values - middle) / np.maximum(spread, _LEAST_SPREAD))


@cache
def healthy_limit(clients: int, rate: float) -> float:
    """Return the score that the largest of a healthy cohort exceeds at this rate, by simulation of normal cohorts.

    The robust spread of few clients is often far too small, so that their limit is far higher than that of many.
    """
    if not 0 < rate < 1:
        raise ConfigError(f"false_alarms is a rate per round, between 0 and 1 (0.01 is usual); got {rate}.")
    random = np.random.default_rng(0)
    draws = max(200, _DRAWS // clients)
    largest = np.concatenate([
        robust_scores(random.standard_normal((draws // 10, clients))).max(axis=-1) for _ in range(10)
    ])  # fmt: skip
    return float(np.quantile(largest, 1 - rate))


def _random_inputs(module: nn.Module, shape: Sequence[int], inputs: int, generator: torch.Generator) -> Tensor:
    """Draw inputs as published: uniform, by Kaiming's rule for a tensor of a sample's shape. Tokens are drawn
    uniformly.
    """
    words = next((layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)), None)
    if words is not None:
        return torch.randint(words, (inputs, *shape), generator=generator)
    bound = math.sqrt(6 / math.prod(shape[1:] or shape))
    return (2 * torch.rand(inputs, *shape, generator=generator) - 1) * bound


def random_answers(
    module: nn.Module, states: Mapping[Node, Tensor], shape: Sequence[int], *, inputs: int = 10, seed: int = 0
) -> Tensor:
    """Return the outputs of each client's neurons, [clients, inputs, neurons]: the layers' outputs, cut off at 0."""
    x = _random_inputs(module, shape, inputs, torch.Generator().manual_seed(seed))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    answers = []
    with evaluation_without_gradients(module), _recorded_outputs(module) as outputs:
        for flat in states.values():
            functional_call(module, _unflattened(tensors, flat), (x.to(flat.device),))
            answers.append(torch.cat([answer.reshape(len(x), -1) for answer in outputs], 1).clamp_min_(0).cpu())
            outputs.clear()
    return torch.stack(answers)


@contextmanager
def _recorded_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    heard: list[Tensor] = []

    def hear(_: nn.Module, __: object, answer: Tensor | tuple[Tensor, ...]) -> None:
        heard.append(answer if isinstance(answer, Tensor) else answer[0])

    hooks = [layer.register_forward_hook(hear) for layer in module.modules() if isinstance(layer, _LAYERS)]
    if not hooks:
        raise ConfigError("The model has no dense, convolutional or recurrent layer whose neurons could be compared.")
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _unflattened(tensors: Sequence[tuple[str, Tensor]], flat: Tensor) -> dict[str, Tensor]:
    tensors_by_name, offset = {}, 0
    for name, like in tensors:
        if offset + like.numel() > len(flat):
            break
        tensors_by_name[name] = flat[offset : offset + like.numel()].view(like.shape).to(like.dtype)
        offset += like.numel()
    return tensors_by_name
