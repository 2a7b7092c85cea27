# SPDX-License-Identifier: Apache-2.0
"""Data sets that need no files: the digits that ship with scikit-learn, and synthetic ones of any difficulty."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import MissingExtraError
from fedvitals.lab.data.arrays import TEST_SHARE, Arrays
from fedvitals.lab.description import Description, require
from fedvitals.lab.streams import stream

TARGETS = ("classes", "numbers", "labels", "tasks", "tokens", "inputs")


class Digits(Description, frozen=True):
    """1,797 hand-written digits, 8 × 8 grey pixels from 0 to 1; a fixed fifth of them is the test set.

    Args:
        reconstruct: Whether the target is the image itself, for an autoencoder, instead of the digit.
    """

    reconstruct: bool = False

    later = ("reconstruct",)

    def make(self) -> Arrays:
        spec = importlib.util.find_spec("sklearn")
        if spec is None or spec.origin is None:
            raise MissingExtraError("scikit-learn", "lab", "The data set digits")
        # Its file, since to import scikit-learn for it takes a second: 64 pixels from 0 to 16 and the digit, per line.
        file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(file, delimiter=",", dtype=np.float32) if file.exists() else _digits_by_import()
        x = table[:, :64].reshape(-1, 1, 8, 8) / np.float32(16)
        y = table[:, 64].astype(np.int64)
        return Arrays(x, y, classes=10, name="digits", reconstruct=self.reconstruct)


def _digits_by_import() -> np.ndarray[Any, Any]:
    """Load the digits through scikit-learn, for versions that keep the file elsewhere."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra, and slow

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.float32)


class Synthetic(Description, frozen=True):
    """Classes as Gaussian clouds of spread 1, each around a centre of its own.

    A sequence's class determines the mean over its steps (each step is as noisy as a vector would be); tokens are
    drawn from the class's own distribution. The test set is a fifth of `samples`.

    Args:
        samples: The number of training samples.
        features: Numbers in a sample, or in a step of a sequence.
        classes: The number of classes.
        separation: The distance of the centres from 0; of tokens, how much their log-probabilities spread.
        sequence: Steps in a sample; None: samples are vectors.
        vocabulary: With `sequence`, samples are tokens, of this many kinds.
        seed: The seed of the data, apart from the experiment's.
        targets: «classes»; or of the same samples «numbers» (one, a smooth function of the sample), «labels» (as
            many as `classes`, each true on one side of a random plane), «tasks» (the class and the number), «tokens»
            (of token sequences: a tag of each step that depends on the token and the one before it), or «inputs».
    """

    samples: int = 4000
    features: int = 32
    classes: int = 10
    separation: float = 3.0
    sequence: int | None = None
    vocabulary: int | None = None
    seed: int = 0
    targets: Literal["classes", "numbers", "labels", "tasks", "tokens", "inputs"] = "classes"

    later = ("targets",)

    def __post_init__(self) -> None:
        require(self.classes >= 2, "number of classes of synthetic", self.classes, "at least 2")
        least = 5 * self.classes
        require(self.samples >= least, "samples of synthetic", self.samples, f"at least 5 of each class: {least}")
        require(self.features >= 1, "features of synthetic", self.features, "at least 1")
        require(0 <= self.separation < 1e6, "separation of synthetic", self.separation, "from 0 to a million")
        require(self.sequence is None or self.sequence >= 1, "sequence of synthetic", self.sequence, "at least 1 step")
        require(
            self.vocabulary is None or (self.vocabulary >= 2 and self.sequence is not None),
            "vocabulary of synthetic",
            self.vocabulary,
            "at least 2 tokens, and sequence must say how many make a sample",
        )
        require(self.targets in TARGETS, "targets of synthetic", self.targets, f"one of {', '.join(TARGETS)}")
        fits = self.targets == "classes" or (self.targets == "tokens") == (self.vocabulary is not None)
        require(fits, "targets of synthetic", self.targets, "«tokens» with a vocabulary, and another without")

    def make(self) -> Arrays:
        generator = stream(self.seed, "synthetic")
        y = torch.arange(self.samples) % self.classes  # classes are as large as each other, to within one sample
        y = y[torch.randperm(self.samples, generator=generator)]
        x = self._tokens(y, generator) if self.vocabulary else self._clouds(y, generator)
        test = round(self.samples * TEST_SHARE)
        if self.targets in ("classes", "inputs"):
            own: dict[str, Any] = {"classes": self.classes, "reconstruct": self.targets == "inputs"}
        else:
            y = self._other_targets(x, y, generator)
            own = {"classes": self.classes} if self.targets == "tokens" else {}
            own |= {"tasks": (self.classes, 1)} if self.targets == "tasks" else {}
        return Arrays(x[test:], y[test:], x[:test], y[:test], name="synthetic", **own)

    def _other_targets(self, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        """Return the targets that are not classes."""
        if self.targets == "tokens":
            table = torch.randint(self.classes, (self.vocabulary or 0, self.vocabulary or 0), generator=generator)
            before = torch.cat([x[:, :1], x[:, :-1]], 1)
            tags: Tensor = table[before, x]
            return tags
        flat = x.flatten(1)
        planes = torch.randn(flat.shape[1], self.classes, generator=generator) / flat.shape[1] ** 0.5
        sides = flat @ planes
        if self.targets == "labels":
            return sides > 0  # type: ignore[no-any-return]
        number = torch.tanh(sides[:, 0]) + 0.5 * sides[:, 1] + 0.1 * torch.randn(len(flat), generator=generator)
        return number if self.targets == "numbers" else torch.stack([y.float(), number], 1)

    def _clouds(self, y: Tensor, generator: torch.Generator) -> Tensor:
        centres = torch.randn(self.classes, self.features, generator=generator)
        centres = self.separation * centres / centres.norm(dim=1, keepdim=True)
        steps = 1 if self.sequence is None else self.sequence
        x: Tensor = centres[y][:, None] + torch.randn(len(y), steps, self.features, generator=generator)
        return x[:, 0] if self.sequence is None else x

    def _tokens(self, y: Tensor, generator: torch.Generator) -> Tensor:
        logits = self.separation * torch.randn(self.classes, self.vocabulary or 0, generator=generator)
        chances = torch.softmax(logits, 1)
        x = torch.empty(len(y), self.sequence or 0, dtype=torch.int64)
        for label in range(self.classes):
            mine = torch.nonzero(y == label).flatten()
            drawn = torch.multinomial(chances[label], x[mine].numel(), replacement=True, generator=generator)
            x[mine] = drawn.view(len(mine), -1)
        return x
