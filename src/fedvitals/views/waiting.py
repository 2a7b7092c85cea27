# SPDX-License-Identifier: Apache-2.0
"""Reports for whom rounds waited, and for how long: used by findings, rounds, profile, report and terminal alike.

It is based on the critical paths: a client is waited for by as many seconds as its rounds would be shorter without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedvitals.analysis.critical_path import CriticalPath
from fedvitals.analysis.stragglers import COSTLY, stragglers
from fedvitals.analysis.timeline import RoundTime
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import end_of_run
from fedvitals.views.case_sentences import joined
from fedvitals.views.memo import remembered
from fedvitals.views.timed_rounds import asked_rounds, timed_rounds
from fedvitals.views.units import percent, seconds

NAMED = 3  # clients in a sentence
OFTEN = 10  # rounds


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom the rounds from `first` to `last` waited."""

    first: int | None = None
    last: int | None = None
    seconds: float = 0.0  # total of all these rounds
    lost: Mapping[str, float] = field(default_factory=dict)  # client → seconds by which they were longer; largest first

    def in_words(self) -> str:
        """Return «Rounds 0 to 8 waited 17 s for c7, 46 % of their time»; empty if no client cost a hundredth of it."""
        costly = [node for node, lost in self.lost.items() if lost >= COSTLY * self.seconds > 0]
        return f"{self._rounds()} waited {', '.join(map(self._for, costly[:NAMED]))}" if costly else ""

    def is_costly(self, nodes: Collection[str]) -> bool:
        """Return whether these clients together cost at least a hundredth of the rounds' time."""
        return sum(self.lost.get(node, 0.0) for node in nodes) >= COSTLY * self.seconds > 0

    def for_clients(self, nodes: Collection[str], labels: Mapping[str, str]) -> str:
        """Return the same for some clients together, even if no round waited for them; empty if nothing is timed."""
        if self.first is None or not nodes:
            return ""
        lost, whom = sum(self.lost.get(node, 0.0) for node in nodes), joined([*nodes], labels)
        if not self.is_costly(nodes):
            return f"{self._rounds()} waited less than 1 % of their time for {whom}"
        return f"{self._rounds()} waited {seconds(lost)} for {whom}, {percent(lost / self.seconds)} of their time"

    def _rounds(self) -> str:
        return f"Round {self.last}" if self.first == self.last else f"Rounds {self.first} to {self.last}"

    def _for(self, node: str) -> str:
        lost = self.lost[node]
        return f"{seconds(lost)} for {node} ({percent(lost / self.seconds)} of their time)"


def waiting_of(times: Sequence[RoundTime], paths: Sequence[CriticalPath]) -> Waiting:
    """Compute for whom these rounds of one clock waited."""
    if not times:
        return Waiting()
    lost = {slow.node: slow.seconds_lost for slow in stragglers(times, most=len(times), paths=paths)}
    return Waiting(times[0].round, times[-1].round, sum(time.seconds for time in times), lost)


def waiting_in(reader: Reader, run: str) -> Waiting:
    """Read for whom the newest rounds of a run waited: those shown first on its page of rounds.

    While a run trains, it is read again every tenth round: for a thousand clients it takes half a second.
    """
    rounds = reader.history(run).rounds()
    until = len(rounds) if len(rounds) < OFTEN else len(rounds) // OFTEN

    def read() -> Waiting:
        looked = timed_rounds(reader, asked_rounds(reader, run))
        return waiting_of(looked.times, looked.paths)

    return remembered(reader, "waiting", run, (until, end_of_run(reader, run)), read)
