# SPDX-License-Identifier: Apache-2.0
"""Baselines that need the updates themselves: Multi-Krum's selection, FedDebug's differential activations, AlignIns and
FLDetector.

All are written here from their papers, for comparison on the same cases. They examine a round while it runs, and their
results are kept beside the run: numbers by client, from which `accused_by` and `feddebug_accused` follow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.protocols import Node
from fedvitals_studies.faultbank.baselines.differential import (
    elimination_order,
    random_answers,
    score_answers,
    states_of,
    votes_of,
)
from fedvitals_studies.faultbank.baselines.published import ALIGN_INS, FL_DETECTOR, FLDetector, align_ins_scores

ScoresByMethod = dict[str, dict[Node, float]]  # method → client → score

FAULTY = 0.25  # share of the cohort against which Multi-Krum guards
MOST = 10  # culprits that FedDebug may be asked for
KRUM, FEDDEBUG, DIFFERENTIAL = "multi_krum", "feddebug", "differential"
BROKEN = 1e9  # replaces an infinite score: JSON has no infinity


class UpdateBaselines:
    """Examines the updates of chosen rounds (None: of all). With `histories`, FLDetector examines every round.

    A host that passes a round's updates in parts calls `gather` with each part, and `close` after the last; one that
    has them all at once calls `look`.
    """

    def __init__(
        self,
        module: nn.Module,
        sample_shape: Sequence[int],
        seed: int = 0,
        rounds_to_test: Iterable[int] | None = None,
        *,
        histories: bool = False,
    ) -> None:
        self._module = copy.deepcopy(module)  # our own: other code's hooks must not see our calls
        self._shape, self._seed = tuple(sample_shape), seed
        self._rounds = None if rounds_to_test is None else frozenset(rounds_to_test)
        self._detector = FLDetector() if histories else None
        self._round: int | None = None
        self._gathered: dict[Node, Sequence[Tensor]] = {}

    def look(self, round_index: int, deltas: Mapping[Node, Sequence[Tensor]], global_state: Any) -> ScoresByMethod:
        """Return the methods' scores of a whole round: `global_state` is the model, or its state, before the round."""
        self.gather(round_index, deltas, global_state)
        return self.close()

    def gather(self, round_index: int, deltas: Mapping[Node, Sequence[Tensor]], global_state: Any) -> None:
        """Add some of a round's updates. The global model is read on the first call, since it may change before
        `close`.
        """
        if not self.wants(round_index):
            return
        if round_index != self._round:
            self._round, self._gathered = round_index, {}
            _load(self._module, global_state)
        self._gathered.update(deltas)

    def wants(self, round_index: int) -> bool:
        """Whether a round's updates are needed."""
        return self._rounds is None or round_index in self._rounds or self._detector is not None

    def close(self) -> ScoresByMethod:
        """Return the methods' scores for everything gathered; empty for a round that is not examined."""
        gathered, self._gathered = self._gathered, {}
        number, self._round = self._round, None
        if number is None or len(gathered) < 2:
            return {}
        model = torch.cat([weights.detach().reshape(-1) for weights in self._module.parameters()]).cpu()
        if self._detector is not None:
            self._detector.add(gathered, model)
            if self._rounds is not None and number not in self._rounds:
                return {}
        found: ScoresByMethod = {KRUM: krum_scores(gathered), ALIGN_INS: align_ins_scores(gathered, model)}
        if self._detector is not None:
            found[FL_DETECTOR] = self._detector.scores()
        states = states_of(self._module, gathered)
        seed = 1000 * self._seed + number
        answers = random_answers(self._module, states, self._shape, seed=seed)
        order = elimination_order(answers, min(MOST, len(states) // 2), seed=seed)
        for culprits in range(1, order.shape[1] + 1):
            votes = votes_of([*states], order, culprits)
            found[f"{FEDDEBUG}.{culprits}"] = {node: float(count) for node, count in votes.items() if count}
        ours = score_answers([*states], answers)
        found[DIFFERENTIAL] = {node: min(score, BROKEN) for node, score in ours.scores.items()}
        return found


def krum_scores(deltas: Mapping[Node, Sequence[Tensor]], faulty: float = FAULTY) -> dict[Node, float]:
    """Return each client's Krum score, as a multiple of the worst that Multi-Krum selects: above 1, it is excluded.

    Of n clients f = ⌊faulty · n⌋ are assumed faulty, fewer if n < 2f + 3; the score is the sum of squared distances to
    the n − f − 2 nearest others, and the n − f best are selected (Blanchard et al. 2017).
    """
    nodes = [*deltas]
    count = len(nodes)
    expected = max(0, min(int(faulty * count), (count - 3) // 2))
    scores = _krum(torch.stack([torch.cat([d.reshape(-1) for d in deltas[n]]).double() for n in nodes]), expected)
    order = scores.argsort(stable=True)
    worst = float(scores[order[count - expected - 1]])
    relative = (scores / worst).nan_to_num(nan=1.0, posinf=BROKEN) if worst > 0 else 1.0 + (scores > 0).double()
    relative[order[: count - expected]] = relative[order[: count - expected]].clamp(max=1.0)
    relative[order[count - expected :]] = relative[order[count - expected :]].clamp(min=1.0 + 1e-9)  # ties: excluded
    return {node: float(value) for node, value in zip(nodes, relative, strict=True)}


def _krum(vectors: Tensor, faulty: int) -> Tensor:
    finite = vectors.isfinite().all(1)
    scores = torch.full((len(vectors),), torch.inf, dtype=torch.float64)
    kept = vectors[finite]
    if len(kept) > 1:
        kept = kept - kept.mean(0)  # so that products cancel less
        products = kept @ kept.T
        lengths = products.diagonal()
        squared = (lengths[:, None] + lengths - products - products.T).clamp_min_(0).fill_diagonal_(torch.inf)
        neighbours = max(1, min(len(vectors) - faulty - 2, len(kept) - 1))
        scores[finite] = squared.sort(dim=1).values[:, :neighbours].sum(1)
    return scores


def accused_by(method: str, scores: Mapping[str, Mapping[Node, float]]) -> list[Node]:
    """Return the clients that a method accuses by scores above 1 (Multi-Krum, AlignIns, FLDetector), worst first."""
    return _worst_first({node: score for node, score in scores.get(method, {}).items() if score > 1.0})


def feddebug_accused(scores: Mapping[str, Mapping[Node, float]], culprits: int) -> list[Node]:
    """Return the clients with most votes, given the number of culprits (FedDebug). Nobody if it is zero."""
    known = max((int(key.rpartition(".")[2]) for key in scores if key.startswith(f"{FEDDEBUG}.")), default=0)
    votes = scores.get(f"{FEDDEBUG}.{min(culprits, known)}", {})
    return _worst_first(votes)[:culprits]


def _worst_first(scores: Mapping[Node, float]) -> list[Node]:
    return sorted(scores, key=lambda node: (-scores[node], node))


def _load(module: nn.Module, state: Any) -> None:
    """Load a model, its state by name, or its parameters (and buffers) as one vector, into our own copy."""
    if isinstance(state, nn.Module):
        state = state.state_dict()
    if isinstance(state, Mapping):
        module.load_state_dict({**module.state_dict(), **state})
        return
    offset, flat = 0, torch.as_tensor(state)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if offset + tensor.numel() > len(flat):
                break
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
