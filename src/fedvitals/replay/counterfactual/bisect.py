# SPDX-License-Identifier: Apache-2.0
"""Find the smallest set of clients whose removal restores the good metrics, and since which round, by true re-runs.

Delta debugging with a good first guess. The recorded rounds show which clients changed, and without whom each round's
model would have been better (`evidence.py`). Those are left out together; then each is let in again and stays in unless
that does harm; then other conspicuous clients are left out, and stay out if that helps. Every distinct re-run counts,
including the one of the recorded rounds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.corrections import CorrectionApplier
from fedvitals.lab.engines.engine import single_threaded
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.run import mean_metrics, run_round
from fedvitals.protocols import History
from fedvitals.records import Metric, Run, Where
from fedvitals.replay.counterfactual.change import WhatIfChange, check_restores
from fedvitals.replay.counterfactual.evidence import ClientEvidence, gather_evidence, log_loss
from fedvitals.replay.debugger.conditions import RoundCondition
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.reused_updates import ChangeObserver, copy_of_server
from fedvitals.replay.shares import metric_in_words
from fedvitals.replay.tape.journal import round_ranges
from fedvitals.store.in_memory import MemoryStore

METRICS = ("loss", "accuracy")
SHARE = 0.1  # of what can be won back: a set that wins this much less than the best one is not enough
LEAST = 0.04  # and of the logarithm of the loss (or of accuracy, as a share): less is chance
BACK = 0.7  # of the way back to the good round's metric, where it was better there: the least that is good
CLEAR = 12.0  # half the squares that a client's change explains, from which on it stands out
FAINT = 3.0  # from which on it is worth a try
NEAR = 0.3  # of the most suspicious one's: who is left out with it in the first try
LAST = 3  # rounds up to the bad one in which paths are compared: a single one may be well by chance
BEFORE = 9  # rounds up to the good one that a client is compared with
Metrics = dict[int, dict[str, float]]  # by round
MetricLevels = dict[tuple[int, str], float]  # by round and metric: the higher, the better


@dataclass(frozen=True, slots=True)
class RerunResult:
    """One re-run: without which clients, from which round on, and `value`, the metric in the bad round."""

    without: tuple[str, ...]
    first: int
    value: float


@dataclass
class BisectResult:
    """The result of a bisection. No `clients`: no set of clients that was tried restores the good metrics."""

    run: str
    good: int
    bad: int
    metric: str
    criterion: str  # what counts as restored
    recorded: float  # in the bad round
    clients: tuple[str, ...] = ()
    round: int | None = None  # the first in which they did harm
    restored: float | None = None  # the metric in the bad round without them
    onsets: dict[str, int] = field(default_factory=dict)  # since when each of them is another one than before
    unusual: dict[str, int] = field(default_factory=dict)  # the same of all who stand out, harmful or not
    reruns: int = 0
    allowed: float = 0.0  # 2·log2(rounds) + clients
    tries: list[RerunResult] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        recorded, restored = (metric_in_words(self.metric, value) for value in (self.recorded, self.restored))
        if not self.clients:
            known = ", ".join(f"{node} (since round {round_index})" for node, round_index in self.unusual.items())
            return (
                f"No set of clients was found whose removal after round {self.good} restores the {self.metric} of "
                f"round {self.bad} ({recorded}): the cause may lie in the server or in the settings. "
                f"Who behaves otherwise than before: {known or 'nobody'}."
            )
        them = "them" if len(self.clients) > 1 else "it"
        return (
            f"Since round {self.round}: {', '.join(self.clients)}. Without {them} the {self.metric} of round "
            f"{self.bad} is {restored}, recorded {recorded} ({self.reruns} re-runs)."
        )


def bisect(
    player: Player,
    good: int,
    bad: int,
    *,
    metric: str | None = None,
    until: RoundCondition | None = None,
    suspects: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> BisectResult:
    """Return which clients caused the decline after round `good`, seen in round `bad`.

    `metric`: «loss» or «accuracy»; by default both count, and the one that became worse is shown. `until`: a condition
    that holds in the bad round where all is well, such as parse("accuracy >= 0.8"); by default a set of clients is
    enough if without it almost everything is regained that can be. `suspects`: clients named by findings. `progress` is
    called with a text for each re-run.
    """
    tape, _ = player.tape, player.experiment  # a plain loop has none, and says so
    _check(player, good, bad, metric)
    check_restores(tape, good + 1, bad)
    judged = METRICS if metric is None else (metric,)
    metric = _worsened_metric(player, good, bad) if metric is None else metric
    began = time.perf_counter()
    search = _Search(player, good, bad, metric, judged, until, progress)
    begins = _first_evidence_round(player, good)
    evidence = gather_evidence(player, begins, good, bad, lambda r: progress(f"recorded round {r}"))
    search.count("the recorded rounds, as they were")
    result, order = search.culprit, _ranked_suspects(evidence, suspects)
    result.unusual = {
        node: round_index for node, gain in order if gain >= CLEAR and (round_index := evidence.onset(node)[0])
    }
    clients = search.smallest(order, [node for node in evidence.nodes if evidence.harm(node) > 0])
    if clients:
        result.clients = tuple(sorted(clients, key=evidence.nodes.index))
        result.restored = search.shown(result.clients)
        result.round = search.first(result.clients, evidence)
    result.seconds = time.perf_counter() - began
    return result


class _Search:
    """The search of one bisection: its re-runs, and how they are judged."""

    def __init__(
        self,
        player: Player,
        good: int,
        bad: int,
        metric: str,
        judged: Sequence[str],
        until: RoundCondition | None,
        progress: Callable[[str], None],
    ) -> None:
        self._player, self._good, self._bad, self._metric = player, good, bad, metric
        self._judged, self._until, self._progress = judged, until, progress
        # The server, and the clients' optimisers where these are kept.
        self._begins: dict[int, tuple[ServerState, dict[str, Tensor]]] = {}
        self._known: dict[tuple[frozenset[str], int], Metrics] = {}
        recorded = {r: player.tape.entry(r).measured_metrics() for r in player.tape.rounds}
        at_bad = recorded[bad].get(metric, math.nan)
        self._recorded = recorded
        self._last = [r for r, metrics in recorded.items() if max(good, bad - LAST) < r <= bad and metrics]
        self._worst = self.levels(())
        marks = {name: [_level(recorded[r], name) for r in (good, bad)] for name in METRICS}
        self._least = {
            name: after + BACK * (before - after) for name, (before, after) in marks.items() if before > after + LEAST
        }
        self.culprit = BisectResult(player.tape.setting.run, good, bad, metric, self._criterion(), at_bad)
        self.culprit.allowed = 2 * math.log2(max(2, bad - good)) + player.experiment.clients

    def _criterion(self) -> str:
        if self._until is not None:
            return f"«{self._until}» holds in round {self._bad}"
        fallen = " and ".join(self._least)
        back = f", and {BACK:.0%} of the way back to the {fallen} of round {self._good}" if fallen else ""
        return (
            f"at least {1 - SHARE:.0%} of what leaving out clients can win back of {' and '.join(self._judged)} in the "
            f"last rounds up to {self._bad}{back}"
        )

    # -- re-runs ------------------------------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        """Count a re-run and report it."""
        self.culprit.reruns += 1
        self._progress(f"re-run {self.culprit.reruns}: {what}")

    def run(self, without: Sequence[str], first: int | None = None) -> Metrics:
        """Return the metrics by round, up to the bad one; each distinct re-run is done once."""
        first = self._good + 1 if first is None else first
        key = frozenset(without), first
        if key not in self._known:
            self._known[key] = self._rerun(tuple(without), first)
            value = self._known[key].get(self._bad, {}).get(self._metric, math.nan)
            self.culprit.tries.append(RerunResult(tuple(without), first, value))
            names = ", ".join(without) or "nobody"
            reached = metric_in_words(self._metric, value)
            self.count(f"without {names} from round {first} on: {self._metric} {reached} in round {self._bad}")
        return self._known[key]

    def _rerun(self, without: tuple[str, ...], first: int) -> Metrics:
        player = self._player
        if first not in self._begins:
            server = player.server(first)
            kept = {name: tensor.clone() for name, tensor in player.engine().optimizers().items()}
            self._begins[first] = server, kept
        server, kept = self._begins[first]
        player.engine().restore_optimizers({name: tensor.clone() for name, tensor in kept.items()})
        observer = ChangeObserver(player.tape, first, WhatIfChange(drop=without))
        federation = Federation(player.site, player.engine(), observer, copy_of_server(server))
        corrections, model = CorrectionApplier(player.experiment, observer), copy.deepcopy(player.site.module)
        metrics: Metrics = {}
        for round_index in range(first, self._bad + 1):
            with single_threaded():
                run_round(federation, corrections, round_index, model, evaluate=False)
            if round_index in self._last or self._until is not None:
                metrics[round_index] = mean_metrics(*player.engine().evaluate(federation.server.model))
        return metrics

    # -- judgement ----------------------------------------------------------------------------------------------------

    def levels(self, without: Sequence[str], first: int | None = None) -> MetricLevels:
        """Return the metric levels in the last rounds up to the bad one; before a re-run begins, the recorded ones."""
        metrics = self._recorded | self.run(without, first) if without else self._recorded
        return {(r, name): _level(metrics[r], name) for r in self._last for name in self._judged}

    def shown(self, without: Sequence[str]) -> float:
        """Return the metric in the bad round without these clients."""
        return self.run(without)[self._bad][self._metric]

    def enough(self, without: Sequence[str], best: MetricLevels, first: int | None = None) -> bool:
        """Return whether something is regained, and in none of the last rounds, by no metric, much less than
        possible.
        """
        if not without:
            return False
        if self._until is not None:
            return self._until.holds(_history(self.run(without, first)), (), self._bad) is not None
        at_bad = self.run(without, first)[self._bad]
        if any(_level(at_bad, name) < least for name, least in self._least.items()):
            return False
        levels = self.levels(without, first)
        won = max(levels[self._bad, name] - self._worst[self._bad, name] for name in self._judged)
        return won >= LEAST and not self._better(best, levels)

    def _better(self, levels: MetricLevels, reference: MetricLevels) -> bool:
        """Return whether the levels exceed the reference by more than chance, in some round and metric."""
        return any(
            levels[key] > reference[key] + max(SHARE * (levels[key] - self._worst[key]), LEAST) for key in levels
        )

    # -- the search ---------------------------------------------------------------------------------------------------

    def smallest(self, order: Sequence[tuple[str, float]], harmful: Sequence[str]) -> list[str]:
        """Return the smallest sufficient set. `order`: clients, most suspicious first, with how much each stands
        out.
        """
        nodes = [node for node, _ in order]
        most = max(1, len(nodes) // 2)
        near = [node for node, gain in order if gain >= max(CLEAR, NEAR * order[0][1])][:most]
        clients = self._sufficient(nodes, near or nodes[:1])
        if not clients:
            return []
        kept = self._shrunk(clients)
        others = [node for node, gain in order if gain >= FAINT and node in harmful and node not in clients]
        return self._grown(kept, others) if self._until is None else kept

    def _sufficient(self, nodes: Sequence[str], clients: Sequence[str]) -> list[str]:
        """Return the first guess, or the shortest prefix of the list, by doubling, that is enough; [] if none is."""
        tried = list(clients)
        while True:
            if self.enough(tried, self.levels(tried)):
                return tried
            if len(tried) >= len(nodes) - 1:
                return []
            tried = list(nodes[: min(len(nodes) - 1, max(2 * len(tried), 2))])

    def _shrunk(self, clients: Sequence[str]) -> list[str]:
        """Return the clients left after readmitting, least suspicious first, everyone who does no harm."""
        kept, best = list(clients), self.levels(clients)
        for node in reversed(clients):
            rest = [other for other in kept if other != node]
            if rest and self.enough(rest, best):
                levels = self.levels(rest)
                kept, best = rest, {key: max(best[key], levels[key]) for key in best}
        return kept

    def _grown(self, clients: Sequence[str], others: Sequence[str]) -> list[str]:
        """Return the clients and every other conspicuous one whose removal regains more than chance, while re-runs
        are left.
        """
        kept, left = list(clients), 2 * math.log2(max(2, self._bad - self._good))
        for node in others:
            if self.culprit.reruns + left > self.culprit.allowed:
                break
            now, more = self.levels(kept), self.levels([*kept, node])
            if self._better(more, now) and not self._better(now, more):
                kept.append(node)
        return kept

    def first(self, clients: Sequence[str], evidence: ClientEvidence) -> int:
        """Return the first round in which the clients did harm: when they changed, if leaving them out from there is
        enough.

        Otherwise they did harm before, and the last round from which it is enough is found by halving.
        """
        self.culprit.onsets = {
            node: round_index for node in clients if (round_index := evidence.onset(node)[0]) is not None
        }
        joint, best = evidence.onset_of_all(clients), self.levels(clients)
        round_index = self._good + 1 if joint is None else joint
        if round_index == self._good + 1 or self.enough(clients, best, round_index):
            return round_index
        low, high = self._good + 1, round_index  # enough from low on, not from high on
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.enough(clients, best, middle) else (low, middle)
        return low


def _check(player: Player, good: int, bad: int, metric: str | None) -> None:
    for round_index in (good, bad):
        player.tape.entry(round_index)  # an error that says which rounds there are
    if good >= bad:
        raise ConfigError(f"The good round comes before the bad one; got good {good} and bad {bad}.")
    for round_index in (good, bad):
        if "loss" not in player.tape.entry(round_index).metrics:
            known = [r for r in player.tape.rounds if "loss" in player.tape.entry(r).metrics]
            raise ConfigError(
                f"The model of round {round_index} was not tested. Rounds that were: {round_ranges(known)}."
            )
    if metric not in (None, *METRICS):
        raise ConfigError(f"The metric is one of {', '.join(METRICS)}; got '{metric}'.")


def _level(metrics: Mapping[str, float], name: str) -> float:
    """Return a metric's level: the higher, the better."""
    return -log_loss(metrics.get("loss")) if name == "loss" else metrics.get(name, 0.0)


def _worsened_metric(player: Player, good: int, bad: int) -> str:
    """Return which metric shows the decline: the loss, unless only the accuracy has fallen."""
    before, after = (player.tape.entry(round_index).measured_metrics() for round_index in (good, bad))
    if log_loss(after.get("loss")) > log_loss(before.get("loss")) + LEAST or "accuracy" not in after:
        return "loss"
    return "accuracy" if after["accuracy"] < before.get("accuracy", 0.0) - LEAST else "loss"


def _first_evidence_round(player: Player, good: int) -> int:
    """Return where the evidence begins: some rounds before the good one, as far as they can be replayed."""
    rounds = [r for r in player.tape.rounds if good - BEFORE < r <= good]
    return next((r for r in rounds if player.tape.nearest(r) is not None), good)


def _ranked_suspects(evidence: ClientEvidence, suspects: Sequence[str]) -> list[tuple[str, float]]:
    """Return clients by how much they stand out; harmless ones count less, and those named by findings more."""
    gains = {}
    for node in evidence.nodes:
        _, gain = evidence.onset(node)
        gains[node] = gain * (1.0 if evidence.harm(node) > 0 else 0.25) * (2.0 if node in suspects else 1.0)
    return sorted(gains.items(), key=lambda gain_of_node: -gain_of_node[1])


def _history(metrics: Metrics) -> History:
    """Return a re-run's metrics as a history, for conditions."""
    store = MemoryStore()
    store.write([Run("bisect", "bisect", "lab")])
    for round_index, values in metrics.items():
        where = Where("bisect", round_index)
        store.write([Metric(where, float(round_index), name, value) for name, value in values.items()])
    return store.history("bisect")
