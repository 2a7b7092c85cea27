# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the members of a group between two local iterations: for one group, or for a whole stack.

A CPU works group by group. On a GPU each call costs more than its computation, and there would be as many calls as
groups in every iteration; there all groups of a stack are exchanged by a few operations, prepared once a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedvitals.lab.aggregators.averages import require_positive_weight, weighted_mean
from fedvitals.lab.engines.tasks import Exchange

MAX_NUMBERS = 1 << 28  # numbers in float64 of one mean: 2 GB

StackExchange = Callable[[Tensor], None]
"""Exchanges the states of a whole stack, [clients, size], in place. It never waits for the device."""


def average(states: Tensor, samples: Tensor) -> Tensor:
    """Return the members' mean, weighted by their samples, for every member."""
    return weighted_mean(states, samples).expand_as(states)


def pass_to_next(states: Tensor, samples: Tensor) -> Tensor:  # noqa: ARG001 - an exchange's signature
    """Return the states with each member's model passed to the next member of the ring."""
    return states.roll(1, 0)


def exchange_for_stack(
    exchange: Exchange, groups: Sequence[slice], samples: Tensor, device: torch.device | str
) -> StackExchange | None:
    """Return a function that performs the exchange in all groups at once, or None if it must be called group by group.

    `groups` are the rows of a stack that belong together; other rows stay unchanged. `samples` are those of all rows,
    on any device: they are read now.
    """
    counts = [float(count) for count in samples.tolist()]
    rows = [range(*group.indices(len(counts))) for group in groups]
    rows = [members for members in rows if len(members)]
    if exchange is average and rows:
        return _stack_average(rows, counts, device)
    if exchange is pass_to_next and rows:
        return _stack_pass(rows, device)
    return None


def _stack_average(groups: Sequence[range], counts: Sequence[float], device: torch.device | str) -> StackExchange:
    heard = [[row for row in members if counts[row] > 0] for members in groups]  # weight 0: its NaN is not heard
    for members, own in zip(groups, heard, strict=True):
        require_positive_weight(len(members), len(own))
    widest = max(map(len, heard))
    # Short groups are filled up with a member of their own, of which nothing is taken: not even NaN.
    padded = [own + own[:1] * (widest - len(own)) for own in heard]
    weights = [[counts[row] for row in own] + [0.0] * (widest - len(own)) for own in heard]
    one_by_one = [row for members in groups for row in members]
    in_order = padded == [[*members] for members in groups] and one_by_one == [*range(len(one_by_one))]
    places = torch.tensor(padded, dtype=torch.int64, device=device).flatten()
    share = torch.tensor(weights, dtype=torch.float64, device=device)[:, :, None]
    total, filled = share.sum(1), share == 0
    uneven = any(len(own) < widest for own in heard)
    receivers = torch.tensor(one_by_one, dtype=torch.int64, device=device)
    group_of = [place for place, members in enumerate(groups) for _ in members]
    source = torch.tensor(group_of, dtype=torch.int64, device=device)

    def exchange(states: Tensor) -> None:
        stretch = max(1, MAX_NUMBERS // (len(groups) * widest))
        for part in states.split(stretch, dim=1):
            own = part[: len(places)] if in_order else part.index_select(0, places)
            weighted = own.unflatten(0, (len(groups), widest)) * share
            if uneven:
                weighted.masked_fill_(filled, 0.0)
            mean = (weighted.sum(1) / total).to(states.dtype)
            if in_order:
                own.unflatten(0, (len(groups), widest)).copy_(mean[:, None])
            else:
                part.index_copy_(0, receivers, mean.index_select(0, source))

    return exchange


def _stack_pass(groups: Sequence[range], device: torch.device | str) -> StackExchange:
    receivers = torch.tensor([row for members in groups for row in members], dtype=torch.int64, device=device)
    senders = itertools.chain.from_iterable((members[-1], *members[:-1]) for members in groups)
    source = torch.tensor([*senders], dtype=torch.int64, device=device)

    def exchange(states: Tensor) -> None:
        states.index_copy_(0, receivers, states.index_select(0, source))

    return exchange
