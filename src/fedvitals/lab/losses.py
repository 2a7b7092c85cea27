# SPDX-License-Identifier: Apache-2.0
"""The losses that local training minimises and evaluation reports, each for certain kinds of targets.

A loss is called like those of `torch.nn.functional`: `loss(outputs, targets, reduction="mean" or "none")`, where «none»
gives one number per sample. `of_batch` is what a training step differentiates; it equals the plain call unless the loss
needs more than outputs and targets (mixup, distillation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, kind_of, require

if TYPE_CHECKING:
    from fedvitals.lab.data.datasets import Dataset

IGNORED = -100  # the target of a step that does not count, such as padding

Model = Callable[[Tensor], Any]


class Loss(Description, frozen=True):
    """Base class of losses."""

    targets: ClassVar[tuple[str, ...]]  # the kinds of targets that it takes; see `Dataset.targets`
    stackable: ClassVar[bool] = True  # whether many clients can be computed at once, with `torch.func.vmap`
    score_name: ClassVar[str] = "accuracy"
    needs_received_model: ClassVar[bool] = False

    def prepared(self, dataset: Dataset) -> Self:
        """Return the loss with what depends on the data filled in; raises ConfigError if it cannot take its targets."""
        if dataset.targets not in self.targets:
            fitting = [kind_of(loss.__name__) for loss in LOSSES if dataset.targets in loss.targets]
            raise ConfigError(
                f"The loss {kind_of(type(self).__name__)} cannot take the targets of {dataset.name}, which are "
                f"{TARGETS[dataset.targets]}. Take {' or '.join(fitting)}."
            )
        return self

    def __call__(self, outputs: Any, y: Tensor, reduction: str = "mean") -> Tensor:
        """Return the mean loss, or with reduction="none" the loss of each sample."""
        each = self.each(outputs, y)
        return each.mean() if reduction == "mean" else each

    def each(self, outputs: Any, y: Tensor) -> Tensor:
        """Return the loss of each sample, [n]."""
        raise NotImplementedError

    def of_batch(self, model: Model, x: Tensor, y: Tensor, received: Model | None = None) -> Tensor:
        """Return the loss that a training step differentiates; `received` is the model as it came from the server."""
        del received
        return self(model(x), y)

    def score(self, outputs: Any, y: Tensor) -> Tensor:
        """Return how good each sample's output is, [n]: by default the share of right answers."""
        raise NotImplementedError


class CrossEntropy(Loss, frozen=True):
    """Cross-entropy of classes, or of tokens at each step.

    Args:
        class_weights: A weight for each class, or «balanced»: samples / (classes × samples of the class).
        smoothing: The share of each target that is moved to all classes.
        mixup: The α of mixup (Zhang et al. 2018): training on mixed pairs of samples; 0: none.
    """

    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    smoothing: float = 0.0
    mixup: float = 0.0

    targets: ClassVar[tuple[str, ...]] = ("classes", "tokens")

    def __post_init__(self) -> None:
        require(0 <= self.smoothing < 1, "smoothing of cross_entropy", self.smoothing, "from 0, below 1")
        require(self.mixup >= 0, "mixup of cross_entropy", self.mixup, "0 or more")
        if isinstance(self.class_weights, list | tuple):
            msgspec.structs.force_setattr(self, "class_weights", tuple(map(float, self.class_weights)))
            positive = all(weight >= 0 for weight in self.class_weights) and sum(self.class_weights) > 0
            require(positive, "class weights of cross_entropy", self.class_weights, "0 or more, not all 0")

    @property
    def plain(self) -> bool:
        """Whether it is the textbook's cross-entropy."""
        return self.class_weights is None and not self.smoothing and not self.mixup

    def prepared(self, dataset: Dataset) -> Self:
        super().prepared(dataset)
        if self.mixup and dataset.vocabulary is not None:
            raise ConfigError("Mixup mixes inputs, and tokens cannot be mixed. Leave mixup out of cross_entropy.")
        if self.class_weights is None:
            return self
        if self.class_weights == "balanced":
            y = dataset.y[dataset.y != IGNORED]
            counts = torch.bincount(y.flatten(), minlength=dataset.outputs[0]).double()
            weights = torch.where(counts > 0, len(y) / (len(counts) * counts.clamp(min=1)), 0.0)
            return msgspec.structs.replace(self, class_weights=tuple(weights.tolist()))
        wanted = dataset.outputs[0]
        require(len(self.class_weights) == wanted, "class weights", self.class_weights, f"{wanted} numbers")
        return self

    def __call__(self, outputs: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        if reduction == "none":
            return self.each(outputs, y)
        return self._cross_entropy(outputs, y, "mean")

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        each = self._cross_entropy(outputs, y, "none")
        if y.dim() == 1:
            return each
        counted = (y != IGNORED).sum(1).clamp(min=1)
        return each.view(y.shape).sum(1) / counted

    def _cross_entropy(self, outputs: Tensor, y: Tensor, reduction: str) -> Tensor:
        weights = None
        if isinstance(self.class_weights, tuple):
            weights = _tensor_of(self.class_weights, outputs.device)
        return F.cross_entropy(
            outputs.flatten(0, -2), y.flatten(), weights, label_smoothing=self.smoothing, reduction=reduction
        )

    def of_batch(self, model: Model, x: Tensor, y: Tensor, received: Model | None = None) -> Tensor:
        if not self.mixup:
            return super().of_batch(model, x, y, received)
        share = float(torch.distributions.Beta(self.mixup, self.mixup).sample())
        other = torch.randperm(len(x))
        outputs = model(share * x + (1 - share) * x[other])
        return share * self(outputs, y) + (1 - share) * self(outputs, y[other])

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        right = outputs.argmax(-1) == y
        return right if y.dim() == 1 else right.sum(1) / (y != IGNORED).sum(1).clamp(min=1)


class _ErrorOfNumbers(Loss, frozen=True):
    """Base class of losses of numbers, evaluated by the mean absolute error."""

    targets: ClassVar[tuple[str, ...]] = ("numbers", "inputs")
    score_name: ClassVar[str] = "absolute_error"

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.reshape(y.shape) - y).abs().flatten(1).mean(1)


class MSE(_ErrorOfNumbers, frozen=True):
    """The mean squared error over the numbers of a sample."""

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.reshape(y.shape) - y).square().flatten(1).mean(1)


class Huber(_ErrorOfNumbers, frozen=True):
    """The Huber loss: the squared error of small deviations, and the absolute error of large ones.

    Args:
        delta: The deviation at which it changes from one to the other.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        require(self.delta > 0, "delta of huber", self.delta, "above 0")

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs.reshape(y.shape), y, reduction="none", delta=self.delta).flatten(1).mean(1)


class BCE(Loss, frozen=True):
    """Binary cross-entropy of each label of a sample, averaged; outputs are logits."""

    targets: ClassVar[tuple[str, ...]] = ("labels",)

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs > 0) == (y > 0.5)).to(torch.float32).mean(1)


class Contrastive(Loss, frozen=True):
    """Supervised contrastive loss (Khosla et al. 2020): outputs are embeddings, close for samples of the same class.

    Evaluated by whether a sample's nearest neighbour in its batch is of its class.

    Args:
        temperature: Divides the similarities; smaller means sharper.
    """

    temperature: float = 0.1

    targets: ClassVar[tuple[str, ...]] = ("classes",)
    stackable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature of contrastive", self.temperature, "above 0")

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        similar, itself = self._similarity(outputs)
        same = (y[:, None] == y) & ~itself
        logs = similar - similar.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
        return -(logs * same).sum(1) / same.sum(1).clamp(min=1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        similar, itself = self._similarity(outputs)
        return y[similar.masked_fill(itself, -torch.inf).argmax(1)] == y

    def _similarity(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        unit = F.normalize(outputs, dim=1)
        return unit @ unit.T / self.temperature, torch.eye(len(outputs), dtype=torch.bool, device=outputs.device)


class Distillation(Loss, frozen=True):
    """Cross-entropy, plus the distance to the received model's answers (Hinton et al. 2015).

    The distance is T² · KL(received ‖ own) of logits divided by the temperature T. It keeps what the server's model
    knows, as in FedGKD.

    Args:
        weight: The weight of the distance.
        temperature: T.
    """

    weight: float = 0.5
    temperature: float = 2.0

    targets: ClassVar[tuple[str, ...]] = ("classes", "tokens")
    stackable: ClassVar[bool] = False
    needs_received_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight of distillation", self.weight, "0 or more")
        require(self.temperature > 0, "temperature of distillation", self.temperature, "above 0")

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return CrossEntropy().each(outputs, y)

    def of_batch(self, model: Model, x: Tensor, y: Tensor, received: Model | None = None) -> Tensor:
        outputs = model(x)
        hard = CrossEntropy()(outputs, y)
        if received is None:
            return hard
        with torch.no_grad():
            teacher = torch.log_softmax(received(x).flatten(0, -2) / self.temperature, -1)
        own = torch.log_softmax(outputs.flatten(0, -2) / self.temperature, -1)
        distance = F.kl_div(own, teacher, reduction="batchmean", log_target=True)
        return hard + self.weight * self.temperature**2 * distance

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return CrossEntropy().score(outputs, y)


class MultiTask(Loss, frozen=True):
    """The weighted sum of one loss per task. The model outputs a tuple, and each task has one column of the targets.

    Evaluated by the accuracy of the first task that has one, else by the first task's error.

    Args:
        parts: One loss per task.
        weights: The weight of each loss in the sum; by default 1 each.
    """

    parts: tuple[CrossEntropy | MSE | Huber, ...] = (CrossEntropy(), MSE())
    weights: tuple[float, ...] = ()  # of the parts; 1 each by default

    targets: ClassVar[tuple[str, ...]] = ("tasks",)
    stackable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "parts", tuple(self.parts))
        msgspec.structs.force_setattr(self, "weights", tuple(self.weights) or (1.0,) * len(self.parts))
        fits = len(self.weights) == len(self.parts) and all(weight >= 0 for weight in self.weights)
        require(fits, "weights of multi_task", self.weights, f"{len(self.parts)} numbers, 0 or more")

    def prepared(self, dataset: Dataset) -> Self:
        super().prepared(dataset)
        for part, outputs in zip(self.parts, dataset.outputs, strict=False):
            fits = isinstance(part, CrossEntropy) == (outputs > 1)
            require(fits, "parts of multi_task", kind_of(type(part).__name__), f"for {outputs} outputs another loss")
        wanted = len(dataset.outputs)
        require(len(self.parts) == wanted, "parts of multi_task", self.parts, f"{wanted}: one for each task")
        return self

    def each(self, outputs: Any, y: Tensor) -> Tensor:
        terms = [
            weight * part.each(output, _column(part, y, task))
            for task, (part, weight, output) in enumerate(zip(self.parts, self.weights, outputs, strict=True))
        ]
        return torch.stack(terms).sum(0)

    def score(self, outputs: Any, y: Tensor) -> Tensor:
        task = next((place for place, part in enumerate(self.parts) if isinstance(part, CrossEntropy)), 0)
        return self.parts[task].score(outputs[task], _column(self.parts[task], y, task))


def _column(part: Loss, y: Tensor, task: int) -> Tensor:
    return y[:, task].long() if isinstance(part, CrossEntropy) else y[:, task : task + 1]


@functools.lru_cache(maxsize=16)
def _tensor_of(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


LOSSES: tuple[type[Loss], ...] = (CrossEntropy, MSE, Huber, BCE, Contrastive, Distillation, MultiTask)

TARGETS = {
    "classes": "one class per sample",
    "numbers": "numbers",
    "labels": "several labels per sample",
    "tokens": "one token per step",
    "tasks": "several tasks per sample",
    "inputs": "the inputs themselves",
}


def usual_loss(targets: str) -> Loss:
    """Return the loss for targets of this kind when an experiment names none."""
    usual: dict[str, Loss] = {"numbers": MSE(), "inputs": MSE(), "labels": BCE(), "tasks": MultiTask()}
    return usual.get(targets, CrossEntropy())
