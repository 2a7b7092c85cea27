# SPDX-License-Identifier: Apache-2.0
"""Which of the paper's sentences hold, which depend on what the paper does not specify, and which do not hold.

Computed: a sentence depends on a reading of its words if these get different verdicts; on a choice if the same
criterion, applied to runs with another choice, gives another verdict than on ours cut to as many rounds; and on a
reading of the whole setting if that sentence of the initial study fares better or worse under another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedvitals.report.markup import Block, Points, Table, Text
from fedvitals_studies.reproduce.claims import WORDS, Choice, Claim, Verdict, verdict_of
from fedvitals_studies.reproduce.conditions import BY_NAME, SCENARIOS, TOPOLOGIES
from fedvitals_studies.reproduce.factorial import POINTS, ReadingScore
from fedvitals_studies.reproduce.results import Result, Results, beginning

ONLY_IN_BASELINE = {"slope", "clip_by"}  # LeakyReLU and clipping: neither of the other scenarios has them
KINDS = {
    "holds": "These hold",
    "partly": "These hold in part: in some repeats, in some checks, or only by the easier threshold",
    "depends": "These depend on choices that the paper leaves open",
    "not": "These do not hold",
    "not testable": "These cannot be tested: no result could decide them, or what they describe never happened here",
    "not run": "These have not been run",
}
COLUMNS = {
    "holds": "holds",
    "partly": "holds in part",
    "depends": "depends on open choices",
    "not": "does not hold",
    "not testable": "cannot be tested",
    "not run": "not run",
}
TOPICS = {  # by the number before the dot of a claim's id
    "1": "Training without clipping, Figures 6 to 8",
    "2": "Training with clipping, Figures 9 to 11",
    "3": "Accuracy in the three scenarios, Figures 12 to 17",
    "4": "Gradient scale (GSC), Figures 18 to 20",
    "5": "Average gradient of each layer, Figures 21 to 29",
}


@dataclass(frozen=True, slots=True)
class Change:
    """Another choice that leads to another verdict."""

    choice: Choice
    ours: str  # cut to as many rounds as the other has
    other: str

    @property
    def words(self) -> str:
        ours = f"our choice over as many rounds: {WORDS[self.ours]}"
        return f"{self.choice.what}: {self.choice.other}: {WORDS[self.other]} ({ours})"


@dataclass(frozen=True, slots=True)
class Sentence:
    """A statement of the paper, with all its readings."""

    readings: tuple[Verdict, ...]
    changes: tuple[tuple[Change, ...], ...]  # of each reading
    tried: int  # other choices on which it could be tested
    elsewhere: tuple[tuple[str, str], ...] = ()  # other readings of the setting, and the verdict under each

    @property
    def kind(self) -> str:
        found = {each.verdict for each in self.readings if each.verdict not in ("not run", "not testable")}
        if len(found) > 1 or any(self.changes) or self._fares_otherwise:
            return "depends"
        if not found:
            return self.readings[0].verdict
        return {"reproduced": "holds"}.get(*found, *found)

    @property
    def _here(self) -> str:
        """Return the best verdict of its readings."""
        return max((each.verdict for each in self.readings), key=_points)

    @property
    def _fares_otherwise(self) -> bool:
        return self._here != "not run" and any(_points(word) != _points(self._here) for _, word in self.elsewhere)

    @property
    def _words_elsewhere(self) -> str:
        """Return the verdicts under other readings of the setting: differing ones by name, the rest as a number."""
        if not self.elsewhere or self._here == "not run":
            return ""
        other = [(name, word) for name, word in self.elsewhere if _points(word) != _points(self._here)]
        same = len(self.elsewhere) - len(other)
        named = [f"{WORDS[word]} with {name}" for name, word in other]
        named += [f"no better and no worse under {same} other{'s' if other and same > 1 else ''}"] if same else []
        return f" In the factorial: {'; '.join(named)}{'' if other else ' reading' + 's' * (same > 1)}."

    @property
    def words(self) -> str:
        ids = ", ".join(each.claim.id for each in self.readings)
        said = f"{ids}: «{self.readings[0].claim.says}»"
        if len({each.verdict for each in self.readings}) > 1:
            readings = "; ".join(f"{each.claim.reading or 'ours'} {each.word}" for each in self.readings)
            said += f" By reading: {readings}."
        elif self.kind == "depends":
            said += f" Here: {self.readings[0].word}."
        for each, changes in zip(self.readings, self.changes, strict=True):
            if changes:
                reading = _of(each) if len(self.readings) > 1 else ""
                said += f" Another choice{reading}: {'; '.join(change.words for change in changes)}."
        said += "".join(
            f" Not testable{_of(each)}: {each.untested.rstrip('.')}." for each in self.readings if each.untested
        )
        said += "".join(f" Not run{_of(each)}: {each.lacking}." for each in self.readings if each.verdict == "not run")
        if self.tried and not any(self.changes):
            said += f" The same with {self.tried} other choices."
        return said + self._words_elsewhere


def _points(verdict: str) -> float:
    return POINTS.get(verdict, -1.0 if verdict == "not run" else 0.0)


def _of(verdict: Verdict) -> str:
    return f" [{verdict.claim.reading}]" if verdict.claim.reading else ""


def sentences(
    verdicts: Sequence[Verdict], results: Results, choices: Iterable[Choice], standings: Iterable[ReadingScore] = ()
) -> list[Sentence]:
    """Return all sentences, in the paper's order; `standings`: of the other readings of the whole setting."""
    under = [(each.reading.words, {v.claim.id: v.verdict for v in each.verdicts}) for each in standings]
    groups: dict[str, list[Verdict]] = {}
    by_id = {each.claim.id: each.claim for each in verdicts}
    for each in verdicts:
        twin = by_id.get(each.claim.rereads, each.claim)
        groups.setdefault(twin.says, []).append(each)
    told = [choice for choice in choices if choice.condition is not None]
    found = []
    for readings in groups.values():
        looked = [[_under(each.claim, results, choice) for choice in told] for each in readings]
        changes = tuple(
            tuple(change for change in row if change is not None and change.ours != change.other) for row in looked
        )
        tried = len({change.choice.what for row in looked for change in row if change is not None})
        ids = [each.claim.id for each in readings]
        elsewhere = [
            (name, max((word[i] for i in ids if i in word), key=_points, default="not run")) for name, word in under
        ]
        there = tuple((name, word) for name, word in elsewhere if word != "not run")
        found.append(Sentence(tuple(readings), changes, tried, there))
    return found


def in_short(sentences: Sequence[Sentence]) -> list[Block]:
    """Return the sentences by outcome, one row for each part of the paper; and the clear ones in words."""
    rows = []
    for number, topic in TOPICS.items():
        own = [each for each in sentences if each.readings[0].claim.id.partition(".")[0] == number]
        by_kind = [[each.readings[0].claim.id for each in own if each.kind == kind] for kind in COLUMNS]
        rows.append((topic, *(", ".join(ids) or "–" for ids in by_kind)))
    counts = [sum(each.kind == kind for each in sentences) for kind in COLUMNS]
    rows.append((f"all {len(sentences)} sentences", *map(str, counts)))
    table = Table(
        "Which sentences of the paper hold",
        ("part of the paper", *COLUMNS.values()),
        tuple(rows),
        "«Holds»: all checks pass in all repeats. «In part»: some do, or only the easier threshold is reached. "
        "«Depends»: another choice where the paper is silent, or another reading of its words, gives another verdict. "
        "«Cannot be tested»: no result could decide it, or what it describes never happened in our runs. The sentences "
        "are below.",
    )
    clear = [
        f"**{title}:** " + " ".join(f"«{each.readings[0].claim.says}»" for each in sentences if each.kind == kind)
        for kind, title in (("holds", "Holds"), ("not", "Does not hold"))
        if any(each.kind == kind for each in sentences)
    ]
    return [table, Points(tuple(clear))] if clear else [table]


def blocks(sentences: Sequence[Sentence]) -> list[Block]:
    """Return all sentences, by outcome."""
    made: list[Block] = []
    for kind, title in KINDS.items():
        own = [sentence.words for sentence in sentences if sentence.kind == kind]
        if own:
            made += [Text(f"**{title}** ({len(own)})"), Points(tuple(own))]
    tried = sum(sentence.tried > 0 for sentence in sentences)
    made.append(
        Text(
            f"Single other choices were tried on {tried} of the {len(sentences)}: those about the centralized "
            "scenarios, and about topologies without clipping. The factorial tries them together, on the sentences of "
            "the initial study (1.1 to 2.4). It is not known what the others depend on."
        )
    )
    return made


def whole_set_table(results: Results) -> Table:
    """Return how far a few images are from the paper's form, the client's whole set, and its estimate from exact."""
    rows = []
    for topology in TOPOLOGIES:
        for scenario in SCENARIOS:
            name = f"extended-{topology}-{scenario}"
            runs = [run for run in results.of(name) if "scale.gsc_whole" in run["series"]]
            if runs:
                series = runs[0]["series"]
                few, whole, exact = (series.get(n) for n in ("scale.gsc", "scale.gsc_whole", "scale.gsc_exact"))
                where = [i + 1 for i, value in enumerate(exact or ()) if value is not None]
                rows.append(
                    (name, str(runs[0].get("images", {}).get("round", "–")), _number(few[-1]), _number(whole[-1]),
                     _distances(few, whole), _distances(whole, exact or []), ", ".join(map(str, where)) or "–")
                )  # fmt: skip
    head = (
        "condition", "images of a client", "GSC of them, last round", "of the whole set",
        "distance, median (largest) of the rounds", "estimate from exact, median (largest)", "in rounds",
    )  # fmt: skip
    note = (
        "One repeat. The whole set: as many images as every client has, about 313 of each; estimated by two backward "
        "passes, exactly by one per class."
    )
    return Table("How far a few images lie from the whole set", head, tuple(rows), note)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _distances(ones: Sequence[float | None], others: Sequence[float | None]) -> str:
    pairs = [(a, b) for a, b in zip(ones, others, strict=False) if a is not None and b is not None]
    found = sorted(abs(a / b - 1) if b else (0.0 if a == b else float("inf")) for a, b in pairs)
    if not found:
        return "–"
    return f"{100 * found[len(found) // 2]:.3g} % ({100 * found[-1]:.3g} %)"


def _under(claim: Claim, results: Results, choice: Choice) -> Change | None:
    """Return the claim with another choice, if that was run for everything that the claim is about."""
    instead = stand_ins(choice, results)
    wanted = claim.conditions
    if not all(name in instead and name in results for name in wanted) or all(instead[n] == n for n in wanted):
        return None
    ours: list[Result] = []
    other: list[Result] = []
    for name in wanted:
        rounds = min(results.of(name)[0]["rounds"], results.of(instead[name])[0]["rounds"])
        repeats = set(results.repeats(name)) & set(results.repeats(instead[name]))
        short = dataclasses.replace(BY_NAME[name], rounds=rounds)
        ours += [beginning(run, short) for run in results.of(name) if run["repeat"] in repeats]
        other += [beginning(run, short) for run in results.of(instead[name]) if run["repeat"] in repeats]
    found = [verdict_of(claim, Results(runs)).verdict for runs in (ours, other)]
    return None if "not run" in found else Change(choice, *found)


def stand_ins(choice: Choice, results: Results) -> dict[str, str]:
    """Return, by the paper's condition, the run condition that only differs in this choice."""
    name = choice.condition or ""
    found = {}
    if name.startswith("beyond-"):  # one of a row over the topologies, all clipped
        stem = name.rpartition("-")[0]
        found = {f"initial-{topology}-clipped": f"{stem}-{topology}" for topology in TOPOLOGIES}
    else:
        found["initial-centralized-clipped"] = name
        found |= {f"initial-{topology}-unclipped": f"{name}-{topology}-unclipped" for topology in TOPOLOGIES}
        same = name in BY_NAME and set(BY_NAME[name].settings) <= ONLY_IN_BASELINE
        for scenario in SCENARIOS[1:]:
            plain = f"extended-centralized-{scenario}"
            found[plain] = plain if same else f"{name}-{scenario}"
    found["extended-centralized-baseline"] = name
    return {paper: other for paper, other in found.items() if other in results}
