# SPDX-License-Identifier: Apache-2.0
"""Backdoors: a model that works as it should, except on inputs that the attacker has chosen.

The attack's success is the share of such test inputs, of other classes than the target, that the global model takes for
the target. It is measured wherever the model is evaluated, also before the attack begins: `attack.success`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of, require
from fedvitals.lab.engines.tasks import Node, Update
from fedvitals.lab.faults.data import check_labels, draw_affected
from fedvitals.lab.faults.fault import (
    Count,
    Fault,
    Index,
    ModelHistory,
    SampleForm,
    Share,
    require_within,
)
from fedvitals.lab.faults.updates import change_of, send_change, usable_updates


def _patch(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a mask for samples of this shape, with these cells at the end of the last axes."""
    before = [pad for side in reversed(shape[-cells.dim() :]) for pad in (side - len(cells), 0)]
    return F.pad(cells, before).expand(*shape)


class Backdoor(Fault, frozen=True):
    """An attacker who trains a trigger into the model: some samples carry it, with a label of the attacker's choice.

    BadNets, Gu, Dolan-Gavitt and Garg 2017. The trigger is a patch in the last corner of an image, or the last
    features of a vector.

    Args:
        share: The share of its samples that carries the trigger.
        target: The label that these samples get.
        size: The side of the patch in pixels; of a vector, the number of features.
        value: The number that these pixels or features are set to.
    """

    share: Share = 0.5
    target: Index = 0
    size: Count = 3
    value: Annotated[float, functools.partial(require_within, low=-1e9, high=1e9)] = 1.0
    issue: ClassVar[str] = "byzantine"
    strength_field: ClassVar[str | None] = "share"

    def check_classes(self, classes: int) -> None:
        check_labels((self.target,), classes, kind_of(type(self).__name__))

    def check_samples(self, form: SampleForm) -> None:
        kind, room = kind_of(type(self).__name__), min(form.shape[-2:])
        if form.tokens:
            raise ConfigError(f"The trigger of {kind} is a patch of numbers, and these samples are tokens.")
        require(self.size <= room, f"size of {kind}", self.size, f"{room} or less: a sample is {list(form.shape)}")

    def trigger(self, shape: Sequence[int]) -> Tensor:
        """Return which numbers of a sample of this shape the trigger sets."""
        return _patch(torch.ones([self.size] * min(len(shape), 2), dtype=torch.bool), shape)

    def part_of_trigger(self, shape: Sequence[int]) -> Tensor:
        """Return the part of the trigger that is trained in on this node: all of it."""
        return self.trigger(shape)

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        struck = draw_affected(len(y), self.share, stream)
        marked = struck.view(-1, *[1] * (x.dim() - 1)) & self.part_of_trigger(x.shape[1:])
        return x.masked_fill(marked, self.value), y.masked_fill(struck, self.target)

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        others = y != self.target
        return x[others].masked_fill(self.trigger(x.shape[1:]), self.value), y[others].fill_(self.target)


class DistributedBackdoor(Backdoor, frozen=True):
    """Attackers who divide a trigger among them: each trains a part of it into the model; the whole is used later.

    DBA, Xie, Huang, Chen and Li 2020. The patch is cut into as many equal pieces as there are nodes, row by row.

    Args:
        share: The share of its samples that carries the trigger.
        target: The label that these samples get.
        size: The side of the patch in pixels; of a vector, the number of features.
        value: The number that these pixels or features are set to.
        part: Which piece the node has; by default its place among the nodes.
    """

    part: int | None = None
    issue: ClassVar[str] = "byzantine"
    needs_others: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.part is None or (isinstance(self.part, int) and 0 <= self.part < len(self.nodes))
        require(fits, "part of distributed_backdoor", self.part, "left out, or from 0 to below the number of nodes")

    def check_samples(self, form: SampleForm) -> None:
        super().check_samples(form)
        pieces: int = self.size ** min(len(form.shape), 2)
        fits = 2 <= len(self.nodes) <= pieces
        require(fits, "number of nodes of distributed_backdoor", len(self.nodes), f"2 to {pieces}, the trigger's size")

    def on_node(self, node: Node) -> Self:
        if self.part is not None or node not in self.nodes:
            return self
        return msgspec.structs.replace(self, part=self.nodes.index(node))

    def part_of_trigger(self, shape: Sequence[int]) -> Tensor:
        sides = [self.size] * min(len(shape), 2)
        cells = torch.arange(math.prod(sides))
        own = torch.eq(cells * len(self.nodes) // len(cells), self.part or 0)
        return _patch(own.view(sides), shape)


class EdgeCaseBackdoor(Fault, frozen=True):
    """An attacker who relabels the most unusual inputs of one class as another class.

    «Attack of the tails», Wang et al. 2020. The attack succeeds on the unusual test samples of the class.

    Args:
        source: The class whose unusual inputs are used.
        target: The class that they are taught as.
        share: The share of the attacker's samples that is replaced by unusual ones.
        tail: The share of the class's samples that counts as unusual: those farthest from its mean.
    """

    source: Index = 0
    target: Index = 1
    share: Share = 0.5
    tail: Share = 0.1
    issue: ClassVar[str] = "byzantine"
    strength_field: ClassVar[str | None] = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.source != self.target, "target of edge_case_backdoor", self.target, "another class than its source"
        )

    def check_classes(self, classes: int) -> None:
        check_labels((self.source, self.target), classes, "edge_case_backdoor")

    def check_samples(self, form: SampleForm) -> None:
        if form.tokens:
            raise ConfigError(
                "Samples that are tokens have no mean, so edge_case_backdoor cannot recognise the unusual ones."
            )

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        self.check_classes(classes)
        rare = self.unusual(x, y)
        if not len(rare):
            raise ConfigError(
                f"A client of edge_case_backdoor has no sample of class {self.source} to mislabel. Let it name another "
                "source, or other nodes."
            )
        struck = draw_affected(len(y), self.share, stream)
        chosen = rare[torch.randint(len(rare), (len(y),), generator=stream)]
        rows = torch.where(struck, chosen, torch.arange(len(y)))
        return x[rows], y.masked_fill(struck, self.target)

    def unusual(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the rows of the source class that lie farthest from its mean, farthest first."""
        rows = (y == self.source).nonzero().flatten()
        own = x[rows].flatten(1).double()
        distances = (own - own.mean(0)).norm(dim=1)
        order = distances.argsort(descending=True, stable=True)
        return rows[order[: max(1, round(self.tail * len(rows)))]]

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rare = self.unusual(x, y)
        return x[rare], y[rare].fill_(self.target)


class Neurotoxin(Backdoor, frozen=True):
    """A backdoor that lasts: the update leaves alone the weights that the server's last step has moved most.

    Neurotoxin, Zhang et al. 2022: the honest clients will hardly move the others, so what is learnt there stays. The
    paper masks each local step; here the whole update is masked, once.

    Args:
        share: The share of its samples that carries the trigger.
        target: The label that these samples get.
        size: The side of the patch in pixels; of a vector, the number of features.
        value: The number that these pixels or features are set to.
        top: The share of the weights that is left alone.
    """

    top: Share = 0.1
    issue: ClassVar[str] = "byzantine"

    @property
    def history_rounds(self) -> int:
        return 1

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        now, before = past.model(0), past.model(1)
        if now is None or before is None:  # in the first round the server has not moved yet
            return
        moved = (now - before)[: past.weights].abs()
        masked = moved.argsort(descending=True, stable=True)[: round(self.top * past.weights)]
        send_change(update, change_of(update, past.weights).index_fill(0, masked, 0.0))


class ModelReplacement(Backdoor, frozen=True):
    """A backdoor that takes over at once: the update is so long that the average becomes the attacker's own model.

    «How to backdoor federated learning», Bagdasaryan et al. 2020. As far as the others' updates cancel out, as they
    nearly do once the model has converged, the new global model is the attacker's.

    Args:
        share: The share of its samples that carries the trigger.
        target: The label that these samples get.
        size: The side of the patch in pixels; of a vector, the number of features.
        value: The number that these pixels or features are set to.
        factor: What the update is multiplied by; None: n / η, where n is the inverse of the attackers' share of all
            samples and η the server's learning rate.
    """

    factor: float | None = None
    issue: ClassVar[str] = "byzantine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor is not None:
            require_within(self, "factor", 0, above=True)

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        del stream  # nothing is drawn
        attackers = usable_updates(updates, affected)
        own = sum(update.samples for update in attackers)
        if not own:
            return
        factor = self.factor or sum(update.samples for update in updates) / own / past.server_learning_rate
        for update in attackers:
            send_change(update, change_of(update, past.weights) * factor)


FAULTS = (Backdoor, DistributedBackdoor, EdgeCaseBackdoor, Neurotoxin, ModelReplacement)
