# SPDX-License-Identifier: Apache-2.0
"""The page of the reproduction: every claim with our figure, and a verdict computed from `claims.toml`.

Only the whole GTSRB with 100 clients and the paper's rounds is called a reproduction.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedvitals.report.markup import Block, Code, Heading, Picture, Points, Table, Text, markdown, page
from fedvitals_studies.reproduce import clusters, factorial_page, gsc_readings, one_run, rows, scale_alarms
from fedvitals_studies.reproduce import extra_conditions as beyond
from fedvitals_studies.reproduce import verdicts as by_sentence
from fedvitals_studies.reproduce.claims import FILE, REHEARSED, WORDS, Choice, Measured, Verdict, read, verdicts
from fedvitals_studies.reproduce.conditions import CONDITIONS, OURS, Reading
from fedvitals_studies.reproduce.factorial import main_results, standings, with_our_cells
from fedvitals_studies.reproduce.figures import FIGURES, Drawn, Figure, coverage, draw, write
from fedvitals_studies.reproduce.results import Results, as_json, busy, objections

PAPER = (
    "Bogacka, Danilenka, Wasielewska-Michniewska, «Gradient scale monitoring for federated learning systems», "
    "JAMRIS 3/2024"
)
HISTORY = (
    "The first criteria stood before the first run. Those that turned out to be empty were replaced after the runs "
    "shown here and before any run of the factorial: local-test losses instead of batch losses (1.6 to 2.1), "
    "aggregated instead of server accuracy (1.1 to 2.4), the gradient of the whole training set instead of that of the "
    "last mini-batch (5.1 to 5.14)."
)
SMALL_STUDIES = (gsc_readings, one_run, clusters, scale_alarms)
SEEDS = 5  # that a verdict is to be based on
MARKS = {"reproduced": "●", "partly": "◐", "not": "○", "not testable": "∅", "not run": "–"}
SIGNS = {"at least": "≥", "at most": "≤"}
STUDIED = tuple(condition.name for condition in CONDITIONS if condition.study in {"initial", "extended"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The overall result."""

    verdicts: tuple[Verdict, ...]
    objections: tuple[str, ...]  # empty: a reproduction
    done: int  # of the paper's conditions
    files: tuple[Path, ...]
    reading: Reading = OURS  # of what the paper leaves open
    ours: tuple[Verdict, ...] = ()  # under our own reading, if that is another

    @property
    def standing(self) -> str:
        return standing(self.done, self.objections)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of claims for each verdict."""
        found = Counter(verdict.word for verdict in self.verdicts)
        order = dict.fromkeys((*WORDS.values(), *REHEARSED.values()))
        return {word: found[word] for word in order if found[word]}


def standing(done: int, against: Sequence[str]) -> str:
    """Return what the results may be called."""
    if not done:
        return "Nothing has been run yet"
    if against:
        return "A rehearsal, not a reproduction"
    return "A reproduction" if done == len(STUDIED) else f"A reproduction, {done} of {len(STUDIED)} conditions so far"


def write_page(folder: Path, results: Results, claims: Path = FILE) -> Outcome:
    """Write README.md, index.html, verdicts.json and the figures. Returns the overall result."""
    everything, (results, reading) = results, main_results(results)
    ours = with_our_cells(everything)
    found = verdicts(results, claims)
    studied = [result for name in STUDIED for result in results.of(name)]
    done = sum(name in results for name in STUDIED)
    pictures = {figure.name: draw(figure, results) for figure in FIGURES}
    pictures |= {figure.name: draw(figure, ours) for figure in beyond.BEYOND_FIGURES}
    for name, drawn in pictures.items():
        if drawn is None:
            for ending in ("svg", "json"):  # from an earlier page: it would show what no longer exists
                (folder / "figures" / f"{name}.{ending}").unlink(missing_ok=True)
        else:
            write(drawn, folder / "figures")
    against = tuple(objections(studied))
    files = tuple(folder / name for name in ("README.md", "index.html", "verdicts.json"))
    beside_it = tuple(verdicts(ours, claims)) if reading != OURS else ()
    outcome = Outcome(tuple(found), against, done, files, reading, beside_it)
    costs = folder / "costs.json"
    measured = json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else None
    beside = {study: study.table(rows.read(folder / study.FILE)) for study in SMALL_STUDIES}
    choices, others = read(claims)[1], [each for each in standings(everything) if each.reading != reading]
    sentences = by_sentence.sentences(outcome.verdicts, ours, choices, others)
    blocks = [
        *_opening(outcome, sentences, factorial_page.left(everything)),
        Heading(2, "Every sentence of the paper"),
        *by_sentence.blocks(sentences),
        Heading(2, "The factorial: which reading agrees with the whole initial study"),
        *factorial_page.blocks(everything),
        *_in_detail(outcome, pictures, ours, choices, measured, beside),
        Heading(2, "How it was run"),
        Points(tuple(f"{what}: {words}" for what, words in _facts(results, outcome, studied).items())),
        Text(HISTORY),
        beyond.run_table(ours),
        Heading(2, "How to run it again"),
        *_again(),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files[0].write_text(markdown(blocks), encoding="utf-8")
    files[1].write_text(page(blocks, f"fedvitals: {outcome.standing}"), encoding="utf-8")
    files[2].write_text(as_json(as_facts(outcome)), encoding="utf-8")
    return outcome


def as_facts(outcome: Outcome) -> dict[str, Any]:
    """Return the verdicts with their numbers, for programs."""
    return {
        "standing": outcome.standing,
        "under": outcome.reading.words,
        "reproduction": bool(outcome.done) and not outcome.objections,
        "objections": list(outcome.objections),
        "conditions": {"done": outcome.done, "of": len(STUDIED)},
        "counts": outcome.counts,
        "claims": [
            {
                "id": verdict.claim.id, "says": verdict.claim.says, "reading": verdict.claim.reading,
                "figures": list(verdict.claim.figures), "verdict": verdict.word, "repeats": verdict.repeats,
                "untested": verdict.untested, "checks": [_check_facts(each) for each in verdict.measured],
                "beside": None if verdict.beside is None else verdict.beside.word,
            }
            for verdict in outcome.verdicts
        ],
    }  # fmt: skip


def _check_facts(each: Measured) -> dict[str, Any]:
    return {
        "value": each.check.words, "numbers": list(each.numbers), "repeats": list(each.repeats), "is": each.check.side,
        "reproduced": each.check.reproduced, "partly": each.check.partly, "verdict": each.verdict,
        "lacking": each.lacking,
    }  # fmt: skip


def _opening(outcome: Outcome, sentences: Sequence[by_sentence.Sentence], left: str) -> list[Block]:
    """Return the first screen: what this is, what holds and what does not, what was not run, on how many seeds."""
    ours = " (ours)" if outcome.reading == OURS else ", with our own choices beside it"
    blocks: list[Block] = [
        Heading(1, f"Gradient scale monitoring: {outcome.standing[0].lower()}{outcome.standing[1:]}"),
        Text(
            f"We repeated the experiments of {PAPER}, for which no code was published, and tested every sentence in "
            "which the paper describes a result. Its text leaves several settings open. The verdicts here are for this "
            f"reading of it: {outcome.reading.words}{ours}. All verdicts, figures and tables are computed by the "
            "criteria in `claims.toml`; none is written by hand."
        ),
    ]
    if outcome.objections:
        reasons = "; ".join(outcome.objections)
        blocks.append(Text(f"**{outcome.standing}**: {reasons}. What follows shows only that the machinery works."))
    counts = ", ".join(f"{count} {word}" for word, count in outcome.counts.items())
    return [
        *blocks,
        Heading(2, "In short"),
        *by_sentence.in_short(sentences),
        Text(f"**Not run:** {left}"),
        Text(_seeds(outcome)),
        Text(
            f"Where the paper's words allow two readings, both are judged: {len(outcome.verdicts)} criteria in all, "
            f"{counts}."
        ),
    ]


def _in_detail(
    outcome: Outcome,
    pictures: Mapping[str, Drawn | None],
    ours: Results,
    choices: Sequence[Choice],
    costs: Mapping[str, Any] | None,
    small_studies: Mapping[ModuleType, Table | None],
) -> list[Block]:
    """Return the claims with their numbers, the figures, and what goes beyond the paper."""
    shown = {study: [table] if table is not None else [] for study, table in small_studies.items()}
    blocks: list[Block] = [Heading(2, "The claims"), _summary(outcome), *shown[gsc_readings]]
    blocks.append(Heading(2, "The figures"))
    for figure in FIGURES:
        blocks += _figure(figure, pictures[figure.name], outcome)
    blocks.append(Heading(2, "Beyond the paper"))
    blocks += beyond.setting_tables(ours)
    for figure in beyond.BEYOND_FIGURES:
        blocks += _figure(figure, pictures[figure.name], outcome)
    return [
        *blocks,
        by_sentence.whole_set_table(ours),
        beyond.model_table(ours),
        *shown[one_run],
        *shown[clusters],
        *shown[scale_alarms],
        Heading(2, "Where the paper is silent"),
        beyond.sensitivity_table(ours, choices),
        Heading(2, "What the metrics cost"),
        beyond.cost_table(costs),
    ]


def _seeds(outcome: Outcome) -> str:
    """Return the number of seeds behind the verdicts; each repeat has its own seed."""
    judged = [verdict for verdict in outcome.verdicts if verdict.verdict not in {"not run", "not testable"}]
    enough = sum(verdict.repeats >= SEEDS for verdict in judged)
    fewest = _span([verdict.repeats for verdict in judged]) if judged else "0"
    return (
        f"**Seeds:** of {len(judged)} verdicts that could fall either way, {enough} rest on {SEEDS} seeds or more (the "
        f"bar: all). A verdict rests on {fewest} seeds."
    )


def _facts(results: Results, outcome: Outcome, studied: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    per_condition = [len(results.of(name)) for name in STUDIED if name in results]
    trained = [run for run in results.all() if "beginning_of" not in run]
    rounds = sum(run["rounds"] for run in trained)
    facts = {
        "conditions of the paper": f"{outcome.done} of {len(STUDIED)}",
        "repeats of each": _span(per_condition),
        "data": _listed(f"{run['dataset']}, digest `{str(run['digest'])[:16]}`" for run in studied),
        "clients": _listed(run["clients"] for run in studied),
        "engine and device": _listed(_where(run) for run in studied),
        "gradient scale": _images(studied),
        "commit": _listed(f"`{run['commit']}`" for run in studied),
        "time, the paper's conditions": beyond.seconds_words(_seconds(studied)),
    }
    for device, words in (("cpu", "time on CPU"), ("cuda", "time on GPU")):
        own = [run for run in trained if str(run["device"]).startswith(device)]
        if own:
            facts[f"{words}, added up over all {len(own)} runs"] = beyond.seconds_words(_seconds(own))
    if results.pieces:
        told = f"{beyond.seconds_words(busy(results.pieces))} in {len(results.pieces)} pieces, some at the same time"
        facts["of the lent machine's clock"] = told
    return facts | {"rounds trained": f"{rounds:,}"}


def _seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(run["seconds"] for run in runs if "beginning_of" not in run))


def _where(run: Mapping[str, Any]) -> str:
    return f"{run['engine']}, {run['device']}" + (f" ({run['machine']})" if run.get("machine") else "")


def _images(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return on how many images of each client it was measured, and when."""
    told = [run["images"] for run in runs if run.get("images")]
    said = [
        f"{_span([images[when] for images in told if when in images])} images of each client {words}"
        for when, words in (("round", "at the end of a round"), ("iteration", "at every local iteration"))
        if any(when in images for images in told)
    ]
    whole = {run["repeat"] + 1 for run in runs if "scale.gsc_whole" in run["series"]}
    said += (
        [f"the whole set at the end of each round in repeat {_span([*whole])} of the extended study"] if whole else []
    )
    return "; ".join(said) or "16 images of each client at the end of a round, 4 at every iteration"


def _span(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else "none"


def _listed(words: Iterable[object]) -> str:
    return ", ".join(sorted({str(word) for word in words}))


def _summary(outcome: Outcome) -> Table:
    ours = {verdict.claim.id: verdict for verdict in outcome.ours}
    rows = tuple(
        (
            verdict.claim.id,
            verdict.claim.says + (f" [{verdict.claim.reading}]" if verdict.claim.reading else ""),
            ", ".join(map(str, verdict.claim.figures)),
            f"{MARKS[verdict.verdict]} {verdict.word}",
            "<br>".join([*map(_numbers, verdict.measured), *_notes(verdict)]),
            str(verdict.repeats),
            *([f"{MARKS[ours[verdict.claim.id].verdict]} {ours[verdict.claim.id].word}"] if ours else []),
        )
        for verdict in outcome.verdicts
    )
    head = ("claim", "in words [reading]", "figure", "verdict", "numbers (range of the repeats), threshold", "seeds")
    return Table(
        "The paper's claims and their verdicts",
        (*head, *(["with our choices"] if ours else [])),
        rows,
        "● all checks in all repeats; ◐ some, or only the easier threshold; ○ none; ∅ not testable: the checks could "
        "only pass, or only fail; – not run. A reading is named where the paper's words allow two.",
    )


def _notes(verdict: Verdict) -> list[str]:
    """Return why it cannot be tested, and the result of the same checks on the other series."""
    notes = [f"Not testable: {verdict.untested}"] if verdict.verdict == "not testable" else []
    if verdict.beside is not None and verdict.beside.verdict != "not run" and verdict.claim.beside is not None:
        numbers = "; ".join(map(_numbers, verdict.beside.measured))
        notes.append(f"Beside it, {verdict.claim.beside.words}: {verdict.beside.word}: {numbers}")
    return notes


def _numbers(each: Measured) -> str:
    if not each.numbers:
        return each.lacking
    return f"{each.check.short} {beyond.over_repeats(each.numbers)} {_threshold(each)}"


def _threshold(each: Measured) -> str:
    sign = SIGNS[each.check.side]
    held = beyond.number_words(each.check.reproduced)
    if each.verdict == "reproduced":
        return f"({sign} {held})"
    return f"(wanted {sign} {held}, partly {sign} {beyond.number_words(each.check.partly)})"


def _figure(figure: Figure, drawn: Drawn | None, outcome: Outcome) -> list[Block]:
    blocks: list[Block] = [Heading(3, f"Figure {figure.number}: {figure.title}" if figure.number else figure.title)]
    if drawn is None:
        blocks.append(Text(f"Not run: {', '.join(figure.conditions)}."))
    else:
        words = f"{figure.title}; numbers in figures/{figure.name}.json"
        blocks += [Picture(drawn.svg, f"figures/{figure.name}.svg", words), Text(f"{coverage(drawn)}.")]
    if figure.adds:
        blocks.append(Text(figure.adds))
    about = [verdict for verdict in outcome.verdicts if figure.number in verdict.claim.figures]
    if about:
        blocks.append(Points(tuple(_said_and_seen(verdict) for verdict in about)))
    return blocks


def _said_and_seen(verdict: Verdict) -> str:
    claim = verdict.claim
    reading = f" Reading: {claim.reading}." if claim.reading else ""
    seen = "; ".join([*map(_numbers, verdict.measured), *_notes(verdict)])
    return (
        f"{claim.id}: «{claim.says}»{reading} **{MARKS[verdict.verdict]} {verdict.word}.** "
        f"Criterion: {claim.why} Seen: {seen}"
    )


def _again() -> list[Block]:
    return [
        Code(
            (
                "fedvitals reproduce gsc --quick                  # a rehearsal in minutes",
                "fedvitals reproduce gsc --out docs/reproduction  # the paper and beyond, resumable",
                "fedvitals reproduce gsc --only extended --repeats 3",
                "fedvitals reproduce gsc --device cuda --minutes 8  # on a GPU, in pieces",
                "fedvitals reproduce factorial --device cuda --minutes 8  # the 64 cells, then what follows from them",
                "fedvitals reproduce gsc --page-only              # draw again what is there",
                "# where the GPU is lent and has torch, Triton and numpy only:",
                "fedvitals reproduce gsc --pack PACK  # carry it there; there: python PACK/code/run.py --out OUT",
                "#   the factorial over there: python PACK/code/run.py --study factorial --together --out OUT",
                "fedvitals reproduce gsc --merge OUT --out docs/reproduction",
                "#   or all of it in one command, piece after piece, until nothing is left (docs/gpu.md):",
                "fedvitals reproduce factorial --out docs/reproduction --pieces COMMAND",
                "# the small studies beside it, on a CPU:",
                "python -m fedvitals_studies.reproduce.gsc_readings docs/reproduction",
                "python -m fedvitals_studies.reproduce.one_run docs/reproduction",
                "python -m fedvitals_studies.reproduce.clusters docs/reproduction",
            )
        ),
        Text(
            "Each condition and repeat is one file under `results/`; what is there is not run again. Bands go from the "
            "lowest to the highest repeat. A figure's numbers lie beside it as JSON. On a CPU every iteration is "
            "measured of hierarchical only, on fewer images."
        ),
    ]
