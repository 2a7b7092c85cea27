# SPDX-License-Identifier: Apache-2.0
"""Two published detectors of attackers, written from their papers: AlignIns (CVPR 2025) and FLDetector (KDD 2022).

Both with the papers' own settings, to be compared with on the same runs. A score above 1 accuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedvitals.protocols import Node

ALIGN_INS, FL_DETECTOR = "align_ins", "fl_detector"
BROKEN = 1e9  # score of an update that is not finite: JSON has no infinity
LARGEST = 0.3  # share of the values of an update whose signs AlignIns looks at
WINDOW = 10  # rounds in FLDetector's history
REFERENCES = 20  # uniform samples that its gap statistic compares with

Updates = Mapping[Node, Sequence[Tensor]]


def align_ins_scores(updates: Updates, model: Tensor) -> dict[Node, float]:
    """Return each client's distance from the median client, in standard deviations, by the worse of two signs.

    These are the cosine of its update with the global model (`model`, before the round), and the share of its largest
    values whose sign is that of most clients. The paper keeps clients up to 1 in both.
    """
    vectors = _vectors(updates)
    broken = ~vectors.isfinite().all(1)
    vectors[broken] = 0.0
    cosines = torch.nn.functional.cosine_similarity(vectors, model[: vectors.shape[1]].double()[None], dim=1)
    most = vectors.sign().sum(0).sign()
    largest = vectors.abs().topk(max(1, int(LARGEST * vectors.shape[1])), dim=1).indices
    same = (vectors.sign().gather(1, largest) == most[largest]).double().mean(1)
    scores = torch.maximum(_deviations(cosines), _deviations(same))
    scores[broken] = BROKEN
    return dict(zip(updates, scores.tolist(), strict=True))


def _deviations(values: Tensor) -> Tensor:
    spread = values.std(correction=0)
    return (values - values.median()).abs() / spread if spread > 0 else torch.zeros_like(values)


class FLDetector:
    """Predicts each client's update from its last one and the model's change; long mispredicted clients are accused.

    The Hessian between two rounds is approximated from the last `WINDOW` changes of the global model and of the mean
    update (L-BFGS). A client that did not take part in the previous round is not predicted.
    """

    def __init__(self) -> None:
        self._model: Tensor | None = None
        self._mean: Tensor | None = None
        self._last: dict[Node, Tensor] = {}
        self._steps: deque[Tensor] = deque(maxlen=WINDOW)
        self._turns: deque[Tensor] = deque(maxlen=WINDOW)
        self._errors: dict[Node, deque[float]] = {}
        self.rounds = 0  # in which clients were predicted

    def add(self, updates: Updates, model: Tensor) -> None:
        """Add a round: its updates, and the global model before it."""
        gradients = {n: -v for n, v in zip(updates, _vectors(updates), strict=True) if bool(v.isfinite().all())}
        if not gradients:
            return
        mean = torch.stack([*gradients.values()]).mean(0)
        model = model[: len(mean)].double().clone()
        if self._model is not None and self._mean is not None:
            step = model - self._model
            if len(self._steps) > 0 and bool(step.any()):
                self._predict(gradients, _hessian_times(self._steps, self._turns, step))
            self._steps.append(step)
            self._turns.append(mean - self._mean)
        self._model, self._mean, self._last = model, mean, gradients

    def _predict(self, gradients: Mapping[Node, Tensor], change: Tensor) -> None:
        errors = {
            node: float((self._last[node] + change - gradient).norm())
            for node, gradient in gradients.items()
            if node in self._last
        }
        total = sum(errors.values())
        if total > 0:
            self.rounds += 1
            for node, error in errors.items():
                self._errors.setdefault(node, deque(maxlen=WINDOW)).append(error * len(errors) / total)

    def scores(self) -> dict[Node, float]:
        """Return each client's mean error, relative to the limit between the two groups; at most 1 if there is one
        group.

        Empty until `WINDOW` rounds were predicted.
        """
        if self.rounds < WINDOW or len(self._errors) < 3:
            return {}
        means = {node: sum(errors) / len(errors) for node, errors in self._errors.items()}
        values = torch.tensor([*means.values()], dtype=torch.float64)
        limit = _limit_between(values) if _has_two_groups(values) else float(values.max())
        return {node: mean / limit if limit > 0 else 0.0 for node, mean in means.items()}


def _vectors(updates: Updates) -> Tensor:
    return torch.stack([torch.cat([piece.reshape(-1) for piece in pieces]) for pieces in updates.values()]).double()


def _hessian_times(steps: Sequence[Tensor], turns: Sequence[Tensor], vector: Tensor) -> Tensor:
    """Return B·v by the compact form of L-BFGS (Byrd, Nocedal, Schnabel 1994) from columns S (steps) and Y (turns)."""
    s, y = torch.stack([*steps], 1), torch.stack([*turns], 1)
    products = s.T @ y
    scale = float(products[-1, -1] / (s[:, -1] @ s[:, -1]).clamp_min(1e-30))
    lower = products.tril(-1)
    middle = torch.cat([torch.cat([-products.diag().diag(), lower.T], 1), torch.cat([lower, scale * (s.T @ s)], 1)], 0)
    both = torch.cat([y.T @ vector, scale * (s.T @ vector)])
    correction: Tensor = torch.cat([y, scale * s], 1) @ (torch.linalg.pinv(middle) @ both)
    return scale * vector - correction


def _best_split(values: Tensor) -> tuple[float, int]:
    """Return the smallest sum of squares within two groups of sorted numbers, and the size of the lower group."""
    costs = [float(_within(values[:i]) + _within(values[i:])) for i in range(1, len(values))]
    best = min(range(len(costs)), key=costs.__getitem__)
    return costs[best], best + 1


def _within(values: Tensor) -> Tensor:
    return ((values - values.mean()) ** 2).sum()


def _limit_between(values: Tensor) -> float:
    ordered = values.sort().values
    _, size = _best_split(ordered)
    return float(ordered[size - 1] + ordered[size]) / 2


def _has_two_groups(values: Tensor) -> bool:
    """Whether two groups fit better than one, relative to uniform numbers (gap statistic, Tibshirani et al. 2001)."""
    ordered = values.sort().values
    span = ordered[-1] - ordered[0]
    if span <= 0:
        return False
    ordered = (ordered - ordered[0]) / span
    draws = torch.rand(REFERENCES, len(ordered), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = [draw.sort().values for draw in draws]
    one = torch.tensor([float(_within(draw)) for draw in drawn]).log()
    two = torch.tensor([_best_split(draw)[0] for draw in drawn]).clamp_min(1e-12).log()
    gap_of_one = float(one.mean() - _within(ordered).log())
    gap_of_two = float(two.mean()) - float(torch.tensor(_best_split(ordered)[0]).clamp_min(1e-12).log())
    spread = float(two.std(correction=0)) * (1 + 1 / REFERENCES) ** 0.5
    return bool(gap_of_one < gap_of_two - spread)
