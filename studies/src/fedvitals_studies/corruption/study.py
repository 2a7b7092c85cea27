# SPDX-License-Identifier: Apache-2.0
"""Runs many corruptions and counts how they end: harmless, reported, refused, silent, untold, or with a traceback."""

from __future__ import annotations

import collections
import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals_studies.corruption import readers
from fedvitals_studies.corruption.damage import AT_REST, BY_SQL, KILLED, KINDS, SPILL, TAPE
from fedvitals_studies.corruption.readers import CRASHED, FAILED, Answer
from fedvitals_studies.corruption.samples import make_samples

OUTCOMES = ("harmless", "reported", "refused", "silent", "untold", "traceback")
ROUNDS = 8
# Depends on the clock or the location, not on the store.
_CHANGES = re.compile(
    r'/[^\s"\'<>]*?/(?:case|rest|killed)\b|"(?:seconds|age|now|at_seconds|version|bytes|size)": ?[\d.e+-]+'
)


@dataclass(frozen=True, slots=True)
class Case:
    """One corruption and how it ended; `why` helps to investigate it."""

    kind: str
    seed: int
    outcome: str
    why: str = ""


class Study:
    """The intact folders, with every reader's answers."""

    def __init__(self, folder: Path, *, brief: bool = False) -> None:
        """Create the folders. `brief`: only query fast readers."""
        self._folder, self._brief = folder, brief
        self._samples = make_samples(folder)
        with open_reader(self._samples["rest"] / "runs.db") as reader:
            self._run = queries.find_run(reader, "sample")
        self._sound: dict[str, dict[str, Answer]] = {}
        for kind in (next(iter(AT_REST)), next(iter(KILLED)), next(iter(TAPE)), next(iter(SPILL))):
            store = self._copy(kind)
            _, trouble = readers.ask_doctor(store)
            answers = dict(self._ask(kind, store, report=True))
            if trouble or any(answer.state != "ok" for answer in answers.values()):
                bad = {name: answer for name, answer in answers.items() if answer.state != "ok"}
                raise RuntimeError(f"A sound folder is not: {readers.ask_doctor(store)[0].text}, {bad}")
            self._sound[self._group(kind)] = answers

    @staticmethod
    def _group(kind: str) -> str:
        return "rest" if kind in AT_REST or kind in BY_SQL else kind.partition(":")[0]

    def _copy(self, kind: str) -> Path:
        sample = "killed" if kind in KILLED else "rest"
        case = self._folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self._samples[sample], case)
        if kind not in TAPE and kind not in SPILL:
            shutil.rmtree(case / "runs.db.d", ignore_errors=True)
        elif kind in TAPE:
            for file in (case / "runs.db.d").glob("spill-*"):
                file.unlink()
        return case / "runs.db"

    def _ask(self, kind: str, store: Path, *, report: bool) -> Iterator[tuple[str, Answer]]:
        run = self._run
        if kind in TAPE:
            return readers.tape_answers(store, run, ROUNDS)
        if kind in SPILL:
            return readers.spill_answers(store)
        return readers.store_answers(store, run, brief=self._brief, report=report)

    def run(self, kind: str, seed: int) -> Case:
        """Damage a copy in one way, query all readers, and compare."""
        store = self._copy(kind)
        KINDS[kind](store.parent, random.Random(f"{kind} {seed}"))  # noqa: S311 - no secrets here
        said, trouble = readers.ask_doctor(store)
        answers = dict(self._ask(kind, store, report=seed % 5 == 0))
        crashed = [name for name, answer in (*answers.items(), ("doctor", said)) if answer.state == CRASHED]
        if crashed:
            texts = [*answers.items(), ("doctor", said)]
            return Case(kind, seed, "traceback", f"{crashed}: {dict(texts)[crashed[0]].text[-600:]}")
        sound = self._sound[self._group(kind)]
        failed = [name for name, answer in answers.items() if answer.state == FAILED]
        other = [n for n, a in answers.items() if a.state == "ok" and _plain(a.text) != _plain(sound[n].text)]
        if kind in TAPE and any("on the tape" in answers[name].text for name in failed):
            other = [name for name in other if name != "replay"]  # its list of rounds says what is missing
        if kind in SPILL and other:
            # The doctor reports missing lines; a line that came back changed would be silent.
            kept = set(json.loads(sound["spill"].text))
            other = [] if trouble and set(json.loads(answers["spill"].text)) <= kept else other
        # Through SQL, another program may change any number; then the doctor has to report what cannot be right.
        if other and not (trouble and kind in BY_SQL):
            return Case(kind, seed, "silent", f"{other}, doctor {'in trouble' if trouble else 'content'}")
        if (failed or other) and not trouble:
            missing = kind in TAPE and all("on the tape" in answers[name].text for name in failed)
            return Case(kind, seed, "refused" if missing else "untold", f"{failed}: {answers[failed[0]].text[:300]}")
        return Case(kind, seed, "refused" if failed else "reported" if trouble else "harmless")


def _plain(text: str) -> str:
    return _CHANGES.sub("", text)


def run_study(count: int, seed: int = 0) -> list[Case]:
    """Run `count` corruptions, each kind in turn."""
    kinds = [*KINDS]
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder))
        return [study.run(kinds[i % len(kinds)], seed + i // len(kinds)) for i in range(count)]


def table(cases: list[Case]) -> str:
    """Return the counts by kind as a Markdown table."""
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    for case in cases:
        counts[case.kind][case.outcome] += 1
    lines = [f"| damage | {' | '.join(OUTCOMES)} |", "| --- |" + " ---: |" * len(OUTCOMES)]
    lines += [f"| {kind} | {' | '.join(str(of[o]) for o in OUTCOMES)} |" for kind, of in counts.items() if of]
    total = sum(counts.values(), collections.Counter())
    return "\n".join([*lines, f"| **{len(cases)} in all** | {' | '.join(f'**{total[o]}**' for o in OUTCOMES)} |"])
