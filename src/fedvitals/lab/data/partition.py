# SPDX-License-Identifier: Apache-2.0
"""Partitions of the training samples among clients: each sample goes to exactly one client, for training or local
test.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.description import Description, require


@dataclass(frozen=True, eq=False)
class Shard:
    """One client's data: sorted indices of training samples, and how its camera differs."""

    train: Tensor  # int64
    test: Tensor  # int64; the client's own test, which may be empty
    brightness: float = 1.0  # the pixels are multiplied by it
    rotation: float = 0.0  # degrees, against the clock
    relabel: Tensor | None = None  # [classes]: what the client calls each class; None: as the data set does


class Partition(Protocol):
    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        """Return each client's indices, training and test together, at least `need` per client."""


class IID(Description, frozen=True):
    """Shuffled by sample and dealt equally: sizes differ by at most one."""

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:  # noqa: ARG002
        return list(torch.tensor_split(torch.randperm(len(dataset.y), generator=generator), clients))


class Dirichlet(Description, frozen=True):
    """Label skew: each class is divided in shares drawn from a Dirichlet distribution. Clients with too few samples
    receive some from the largest ones.

    Args:
        alpha: The concentration; smaller means more skew.
        sigma: Quantity skew: a client's shares of all classes are multiplied by a log-normal factor with this σ; 0:
            none.
    """

    alpha: float = 0.3
    sigma: float = 0.0

    later = ("sigma",)

    def __post_init__(self) -> None:
        require(0 < self.alpha < math.inf, "alpha of dirichlet", self.alpha, "above 0 and finite")
        require(0 <= self.sigma <= 10, "sigma of dirichlet", self.sigma, "from 0 to 10")

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        shares: list[list[Tensor]] = [[] for _ in range(clients)]
        sizes = self.sigma * torch.randn(clients, generator=generator, dtype=torch.float64) if self.sigma else 0.0
        for label in dataset.labels.unique():
            members = _shuffled(torch.nonzero(dataset.labels == label).flatten(), generator)
            weights = torch.softmax(log_gammas(self.alpha, clients, generator) + sizes, 0)
            cuts = (weights.cumsum(0) * len(members)).round().long()
            for share, part in zip(shares, torch.tensor_split(members, cuts[:-1]), strict=True):
                share.append(part)
        return _with_minimum([_shuffled(torch.cat(share), generator) for share in shares], need)


def log_gammas(alpha: float, count: int, generator: torch.Generator) -> Tensor:
    """Return the logarithms of Gamma(α) variates, [count]; their softmax is one draw of the Dirichlet distribution.

    As Γ(α) = Γ(α + 1) · U^(1/α): a small α would make them all 0 otherwise.
    """
    alphas = torch.full((count,), alpha, dtype=torch.float64)
    logs = torch._standard_gamma(alphas + 1, generator=generator).log()  # noqa: SLF001 - the one with a generator
    logs += torch.rand(count, generator=generator, dtype=torch.float64).clamp_min(1e-300).log() / alpha
    return logs


class ClassesPerClient(Description, frozen=True):
    """Each client holds samples of exactly this many classes; a class is cut into equal parts for its holders.

    A class gets holders in proportion to its size, so that clients hold similar amounts.

    Args:
        classes: How many classes each client holds.
    """

    classes: int = 2

    def __post_init__(self) -> None:
        require(self.classes >= 1, "number of classes of classes_per_client", self.classes, "at least 1")

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        labels, counts = dataset.labels.unique(return_counts=True)
        holders = self._holders(counts.tolist(), clients)
        pieces = [
            list(torch.tensor_split(_shuffled(torch.nonzero(dataset.labels == label).flatten(), generator), number))
            for label, number in zip(labels, holders, strict=True)
        ]
        held: list[Tensor] = []
        for _ in range(clients):
            # Always from the classes with most pieces left, ties at random: so nobody needs the same class twice.
            left = torch.tensor([len(piece) for piece in pieces]) + torch.rand(len(pieces), generator=generator)
            chosen = left.topk(self.classes).indices.tolist()
            held.append(torch.cat([pieces[index].pop() for index in chosen]))
        smallest = min(map(len, held))
        if smallest < need:
            raise ConfigError(
                f"With classes_per_client({self.classes}) the smallest of {clients} clients holds {smallest} samples, "
                f"{need} are needed. Take fewer clients, or more classes per client."
            )
        return [held[index] for index in torch.randperm(clients, generator=generator)]

    def _holders(self, counts: list[int], clients: int) -> list[int]:
        """Return how many clients hold each class, by repeatedly splitting the class with the largest part."""
        pieces = clients * self.classes
        if self.classes > len(counts):
            raise ConfigError(f"classes_per_client({self.classes}) is not possible: there are {len(counts)} classes.")
        if pieces < len(counts):
            raise ConfigError(
                f"{clients} clients with {self.classes} classes each cannot hold all {len(counts)} classes. "
                f"Take at least {math.ceil(len(counts) / self.classes)} clients, or more classes per client."
            )
        if sum(min(count, clients) for count in counts) < pieces:
            raise ConfigError(f"There are too few samples for {clients} clients with {self.classes} classes each.")
        holders = [1] * len(counts)
        queue = [(-count / 2, index) for index, count in enumerate(counts)]
        heapq.heapify(queue)
        for _ in range(pieces - len(counts)):
            while holders[queue[0][1]] >= min(counts[queue[0][1]], clients):
                heapq.heappop(queue)
            index = queue[0][1]
            holders[index] += 1
            heapq.heapreplace(queue, (-counts[index] / (holders[index] + 1), index))
        return holders


class QuantitySkew(Description, frozen=True):
    """Sizes drawn from a log-normal distribution, labels as in the whole; sigma 0 is equal, 1 some 10 : 1.

    Args:
        sigma: σ of the log-normal distribution: 0 is equal, 1 some 10 : 1.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.sigma <= 10, "sigma of quantity_skew", self.sigma, "from 0 to 10")

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        logs = self.sigma * torch.randn(clients, generator=generator, dtype=torch.float64)
        cuts = (torch.softmax(logs, 0).cumsum(0) * len(dataset.y)).round().long()
        order = torch.randperm(len(dataset.y), generator=generator)
        return _with_minimum(list(torch.tensor_split(order, cuts[:-1])), need)


class FeatureShift(Description, frozen=True):
    """Equal shares, but each client's images differ in brightness and rotation.

    Args:
        brightness: Factors are drawn from 1 ± this.
        rotation: Angles are drawn from ± this, in degrees.
    """

    brightness: float = 0.5
    rotation: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.brightness <= 1, "brightness of feature_shift", self.brightness, "from 0 to 1")
        require(0 <= self.rotation <= 180, "rotation of feature_shift", self.rotation, "from 0 to 180 degrees")

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        if self.rotation and len(dataset.shape) != 3:
            raise ConfigError(f"Only images can be rotated; a sample of {dataset.name} is {list(dataset.shape)}.")
        if dataset.vocabulary is not None:
            raise ConfigError(f"The samples of {dataset.name} are tokens: they have no brightness to be shifted.")
        return IID().parts(dataset, clients, need, generator)


class PermutedLabels(Description, frozen=True):
    """Equal shares, but groups of clients call the classes differently: client i is in group i modulo `groups`.

    Group 0 keeps the data set's labels; every other group has a random permutation of its own, for training and local
    tests alike. No single model fits all groups.

    Args:
        groups: The number of groups; client i is in group i modulo `groups`.
    """

    groups: int = 2

    def __post_init__(self) -> None:
        require(self.groups >= 2, "number of groups of permuted_labels", self.groups, "at least 2")

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        allowed = f"at most the number of clients, {clients}"
        require(self.groups <= clients, "number of groups of permuted_labels", self.groups, allowed)
        orders = math.factorial(min(dataset.classes, 20))
        allowed = f"at most {orders}: {dataset.classes} classes have no more orders"
        require(self.groups <= orders, "number of groups of permuted_labels", self.groups, allowed)
        if dataset.targets != "classes":
            raise ConfigError(f"The targets of {dataset.name} are no classes: they cannot be permuted.")
        return IID().parts(dataset, clients, need, generator)

    def permutations(self, classes: int, generator: torch.Generator) -> list[Tensor | None]:
        """Return each group's names of the classes, [classes], all different; None for group 0."""
        drawn = {tuple(range(classes)): None}
        while len(drawn) < self.groups:
            drawn[tuple(torch.randperm(classes, generator=generator).tolist())] = None
        return [None, *(torch.tensor(order) for order in [*drawn][1:])]


class Natural(Description, frozen=True):
    """Partition by group: a group stays with one client, and there entirely in training or in test.

    Each group goes to the client with the fewest samples so far. A client with one group has no local test.
    """

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        pieces = _groups(dataset)
        if len(pieces) < clients:
            raise ConfigError(f"There are {len(pieces)} groups in {dataset.name}, too few for {clients} clients.")
        held: list[list[Tensor]] = [[] for _ in range(clients)]
        least = [(0, index) for index in range(clients)]
        for number in torch.randperm(len(pieces), generator=generator).tolist():
            size, client = least[0]
            held[client].append(pieces[number])
            heapq.heapreplace(least, (size + len(pieces[number]), client))
        if least[0][0] < need:
            raise ConfigError(
                f"Dealt by group, a client holds {least[0][0]} samples, {need} are needed: fewer clients."
            )
        return [torch.cat(parts) for parts in held]


class GroupPerClient(Description, frozen=True):
    """Each client holds one group, such as a package of a text; the largest groups are taken, the others left out."""

    def parts(self, dataset: Dataset, clients: int, need: int, generator: torch.Generator) -> list[Tensor]:
        pieces = sorted(_groups(dataset), key=len, reverse=True)[:clients]
        if len(pieces) < clients or len(pieces[-1]) < need:
            enough = sum(len(piece) >= need for piece in pieces)
            raise ConfigError(
                f"{enough} groups of {dataset.name} have the {need} samples that a client needs, for {clients} clients."
            )
        return [_shuffled(piece, generator) for piece in pieces]


PARTITIONS = (IID, Dirichlet, ClassesPerClient, QuantitySkew, FeatureShift, PermutedLabels, Natural, GroupPerClient)


def deal(
    partition: Partition,
    dataset: Dataset,
    clients: int,
    generator: torch.Generator,
    test_share: float = 0.2,
    least: int = 1,
) -> list[Shard]:
    """Return a shard for each client; every training sample of the data set is in exactly one of them.

    `test_share` of each client's samples become its local test; at least `least` remain for training.
    """
    require(clients >= 1, "number of clients", clients, "at least 1")
    require(0 <= test_share < 1, "share of local tests", test_share, "from 0 to below 1")
    require(least >= 1, "least number of training samples", least, "at least 1")
    need = least
    while need - _test_count(need, test_share) < least:
        need += 1
    if clients * need > len(dataset.y):
        raise ConfigError(
            f"{len(dataset.y)} samples of {dataset.name} are too few for {clients} clients with at least {need} each "
            f"({least} of them for training). Take at most {max(1, len(dataset.y) // need)} clients."
        )
    parts = partition.parts(dataset, clients, need, generator)
    whole = dataset.groups if isinstance(partition, Natural) else None
    split = [_split(part, test_share, least, whole, generator) for part in parts]
    if isinstance(partition, PermutedLabels):
        groups = partition.permutations(dataset.classes, generator)
        return [Shard(*pair, relabel=groups[place % len(groups)]) for place, pair in enumerate(split)]
    if not isinstance(partition, FeatureShift):
        return [Shard(train, test) for train, test in split]
    drawn = 2 * torch.rand(clients, 2, generator=generator, dtype=torch.float64) - 1
    brightness = (1 + partition.brightness * drawn[:, 0]).tolist()
    rotation = (partition.rotation * drawn[:, 1]).tolist()
    return [Shard(*pair, light, turn) for pair, light, turn in zip(split, brightness, rotation, strict=True)]


def shard_tensors(dataset: Dataset, shard: Shard, part: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """Return a client's samples as model inputs, with its camera's brightness and rotation applied, and the labels that
    it gives them.
    """
    index = shard.train if part == "train" else shard.test
    x, y = dataset.pairs(dataset.x[index], own_labels(shard, dataset.y[index]))
    if shard.brightness != 1:
        bounded = dataset.x.dtype == torch.uint8 or (x.numel() > 0 and float(x.min()) >= 0 and float(x.max()) <= 1)
        x = x * shard.brightness
        x = x.clamp_(max=1) if bounded else x  # a pixel cannot be whiter than white
    if shard.rotation and len(x):
        x = _rotate(x, shard.rotation)
    return x, x if dataset.targets == "inputs" else y


def own_labels(shard: Shard, y: Tensor) -> Tensor:
    """Return what a client calls samples of these labels."""
    return y if shard.relabel is None else shard.relabel[y]


def label_counts(
    shards: Sequence[Shard], y: Tensor, classes: int, part: Literal["train", "test", "all"] = "all"
) -> Tensor:
    """Return the number of samples of each class that each client holds, [clients, classes]."""
    choose: Callable[[Shard], Tensor] = {
        "train": lambda shard: shard.train,
        "test": lambda shard: shard.test,
        "all": lambda shard: torch.cat([shard.train, shard.test]),
    }[part]
    return torch.stack([torch.bincount(own_labels(shard, y[choose(shard)]), minlength=classes) for shard in shards])


def _test_count(held: int, share: float) -> int:
    """Return the number of test samples, rounded to the nearest, leaving at least one for training."""
    return min(round(held * share), held - 1)


def _shuffled(members: Tensor, generator: torch.Generator) -> Tensor:
    return members[torch.randperm(len(members), generator=generator)]


def _with_minimum(parts: list[Tensor], need: int) -> list[Tensor]:
    """Move samples from the largest parts to the smallest until each has at least `need`."""
    richest = [(-len(part), index) for index, part in enumerate(parts)]
    heapq.heapify(richest)
    for index in range(len(parts)):
        while len(parts[index]) < need:
            giver = heapq.heappop(richest)[1]
            # Half of what it can spare: whoever holds most stays among those who hold much.
            moved = max(1, min(need - len(parts[index]), (len(parts[giver]) - need) // 2))
            parts[index] = torch.cat([parts[index], parts[giver][-moved:]])
            parts[giver] = parts[giver][:-moved]
            heapq.heappush(richest, (-len(parts[giver]), giver))
    return parts


def _groups(dataset: Dataset) -> list[Tensor]:
    """The indices of each group."""
    if dataset.groups is None:
        raise ConfigError(
            f"The data set {dataset.name} has no groups to deal by. Take gtsrb, or give your own arrays with `groups`."
        )
    return _by_group(torch.arange(len(dataset.y)), dataset.groups)


def _by_group(members: Tensor, groups: Tensor) -> list[Tensor]:
    _, mine, counts = groups[members].unique(return_inverse=True, return_counts=True)
    return list(torch.split(members[mine.argsort(stable=True)], counts.tolist()))


def _split(
    held: Tensor, share: float, least: int, groups: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Split a client's samples at random into training and test, by whole groups where `groups` is given."""
    wanted = _test_count(len(held), share)
    if groups is None:
        test = _shuffled(held, generator)[:wanted]
    else:
        pieces = _by_group(held, groups)
        taken, size = [held[:0]], 0
        for number in torch.randperm(len(pieces), generator=generator).tolist():
            piece = pieces[number]
            if size + len(piece) / 2 <= wanted and len(held) - size - len(piece) >= least:
                taken.append(piece)
                size += len(piece)
        test = torch.cat(taken)
    train = held[~torch.isin(held, test)]
    return train.sort().values, test.sort().values


def _rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate images around the centre with linear interpolation, repeating the border."""
    angle, (height, width) = math.radians(degrees), x.shape[-2:]
    cosine, sine = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]], dtype=x.dtype)
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
