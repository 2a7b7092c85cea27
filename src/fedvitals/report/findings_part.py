# SPDX-License-Identifier: Apache-2.0
"""The report's verdict, its advice, and every finding with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from fedvitals.certainty import certainty
from fedvitals.diagnosis.cases import Case
from fedvitals.plot.finding_evidence import draw_evidence
from fedvitals.report.markup import Block, Card, Code, Facts, Folded, Heading, Pictures, Points, Table, Text, literal
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.cause_levels import levels_in_words
from fedvitals.views.findings import (
    CaseCard,
    Findings,
    FindingsAsked,
    FullFinding,
    NumberRow,
    findings_page,
    full_finding,
)
from fedvitals.views.profile import Profile
from fedvitals.views.units import number, seconds, whole_percent, with_unit
from fedvitals.views.verdict import Verdict

SHOWN = 3  # cases shown with their evidence before the appendix
FULL = 8  # cases with evidence and advice; the others are rows of a table
LISTED = 60
ADVICE = 5  # cases whose first remedy is listed under what to do
SAVING = 0.05  # share of a round that a change must save to be worth naming
MARKS = {"critical": "■", "warning": "▲", "note": "·"}


def verdict_card(verdict: Verdict) -> Card:
    blocks: list[Block] = [Text(f"{verdict.word} · {literal(verdict.headline)}", "lead")]
    if verdict.why:
        blocks.append(Text(literal(verdict.why)))
    if verdict.next_step:
        blocks.append(Text(f"**Next step:** {literal(verdict.next_step)}"))
    if verdict.detail:
        blocks.append(Text(literal(verdict.detail)))
    tone = verdict.severity if verdict.state == "ill" and verdict.severity else verdict.state
    return Card(f"verdict {tone}", tuple(blocks))


def what_next(findings: Findings, full: Sequence[FullFinding], profile: Profile, run: str) -> list[Block]:
    """Return what to do next, in order: about open findings, then about time, then where to look closer.

    Consequences of another finding need nothing of their own, and nobody speeds up rounds of a model that is lost.
    """
    points: list[str] = []
    open_ = [finding for finding in full if finding.case.still_there and not finding.case.muted]
    urgent = [
        finding for finding in open_ if finding.case.now != "note" and finding.remedies and finding.case.follows is None
    ][:ADVICE]
    in_danger = any(finding.case.severity == "critical" for finding in urgent)
    faster = [remedy for remedy in profile.remedies if remedy.share >= SAVING and not in_danger][:2]
    sped_up = {node for remedy in faster for node in remedy.key.get("without", ())}
    points += [
        f"**{literal(finding.case.place)}** ({literal(finding.case.title)}): {_first_step(finding, findings.verdict)}"
        for finding in urgent
        if finding.case.issue != "STRAGGLER" or finding.case.node not in sped_up  # said below, with the gain
    ]
    cards = [finding.case for finding in open_]
    notes = [f"{literal(card.place)} ({literal(card.sure)})" for card in cards if card.now == "note"]
    if notes:
        points.append(f"Nothing yet about {', '.join(notes)}: only notes. Watch whether they come back.")
    if findings.verdict.state == "unjudged":
        points.append(
            f"{literal(findings.verdict.headline)} The command below lets the detectors look at what is stored."
        )
    for remedy in faster:
        gain = f"{'up to ' if remedy.at_most else ''}{whole_percent(remedy.share)}"
        points.append(
            f"**{literal(remedy.name)}**: a round would take {seconds(remedy.after)} instead of "
            f"{seconds(remedy.before)} ({gain} less). {literal(remedy.costs)}"
        )
    if not points:
        points.append("Nothing needs doing: no open finding, and no change would save much of a round's time.")
    verb = "check" if findings.verdict.state == "unjudged" else "findings"
    first = f"fedvitals {verb} {run}{' --all' if verb == 'findings' else ''}"
    commands = Code((first, f"fedvitals profile {run}", "fedvitals ui"))
    return [Heading(2, "What to do"), Points(tuple(points), numbered=len(points) > 1), commands]


def _first_step(finding: FullFinding, verdict: Verdict) -> str:
    """Return what to do first about a finding: what the verdict says, where it speaks of this one."""
    return literal(verdict.next_step) if finding.case.key == verdict.key and verdict.next_step else finding.remedies[0]


@dataclass(frozen=True, slots=True)
class FindingsPart:
    """The findings as data; the section on evidence; the other findings, for the appendix."""

    page: Findings
    full: list[FullFinding]
    evidence: list[Block]
    others: Folded | None


def findings_part(reader: Reader, run: str, pictures: Pictures) -> FindingsPart:
    """Read the findings of a run: the worst with their evidence, others folded in the appendix, notes folded."""
    findings = findings_page(reader, run, FindingsAsked(limit=LISTED))
    by_key = {case_key(case): case for case in cases_of(reader, run)}
    rounds = reader.history(run).rounds()
    full = [full_finding(reader, run, card.key) for card in findings.cases[:FULL]]
    full.sort(key=lambda finding: finding.case.follows is not None)  # a consequence explains nothing by itself
    cards = [_card(finding, by_key[finding.case.key], rounds, pictures) for finding in full]
    shown = min(SHOWN, sum(finding.case.follows is None for finding in full))
    evidence: list[Block] = [*_counts(findings, shown), *cards[:shown], *_notes(reader, run, findings)]
    rest = findings.cases[FULL:]
    others: list[Block] = [*cards[shown:]]
    if rest:
        more = findings.total - len(findings.cases)
        others.append(_list(rest, "Further findings", f"and {more} more: `fedvitals findings`" if more > 0 else ""))
    return FindingsPart(findings, full, evidence, Folded("Other findings", tuple(others)) if others else None)


def _counts(findings: Findings, shown: int) -> list[Block]:
    counts = findings.counts
    if not findings.total:
        unjudged = findings.verdict.state == "unjudged"
        return [Text(f"No findings. {literal(findings.verdict.headline)}" if unjudged else "No findings.")]
    muted = f", {counts.muted} muted" if counts.muted else ""
    where = f"; {shown} here, the others in the appendix" if findings.total > shown else ""
    return [Text(f"{counts.all} in all: {counts.open} open, {counts.past} resolved{muted}. Worst first{where}.")]


def _notes(reader: Reader, run: str, findings: Findings) -> list[Block]:
    """Return the notes, folded: weak signs that are no findings."""
    if not findings.notes:
        return []
    notes = findings_page(reader, run, FindingsAsked(severity="note", limit=LISTED)).cases
    title = f"{findings.notes} note{'s' if findings.notes != 1 else ''}"
    return [Folded(title, (_list(notes, "", "Signs that are too weak for a finding."),), 4)]


def _list(rest: Sequence[CaseCard], title: str, note: str) -> Table:
    rows = tuple(
        (marked(card.severity), literal(card.title), literal(card.place), literal(card.sure), literal(card.timeline))
        for card in rest
    )  # fmt: skip
    return Table(title, ("severity", "what", "where", "how sure", "when"), rows, note, frozenset({3}))


def _card(finding: FullFinding, case: Case, rounds: Sequence[int], pictures: Pictures) -> Card:
    brief = finding.case
    state = " · muted" if brief.muted else " · acknowledged" if brief.acknowledged else ""
    exact = ", an exact test" if finding.exact else ""
    # A name for files and ids, since a key may contain any character.
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in brief.key)[:40].strip("-").lower() or "case"
    facts = (
        ("issue", literal(brief.issue)),
        ("severity", f"{literal(brief.severity)}{state}"),
        ("when", literal(brief.timeline)),
        ("how sure", f"{literal(brief.sure)}{exact}"),
        *((("of what", literal(levels_in_words(case))),) if brief.levels else ()),
        *(
            (("or else", literal(", ".join(f"{i} {certainty(p)}" for i, p in brief.alternatives))),)
            if brief.alternatives
            else ()
        ),
        *((("follows from", literal(unquote(brief.follows).replace("~", " ").strip())),) if brief.follows else ()),
    )
    blocks: list[Block] = [
        Heading(3, f"{MARKS.get(brief.severity, '·')} {literal(brief.title)}: {literal(brief.place)}"),
        Text(literal(brief.message)),
        Facts(facts),
        *([table] if (table := _numbers(finding)) is not None else []),
        pictures.of(
            f"finding-{name}",
            f"{literal(brief.title)} of {literal(brief.place)}: its signs against the other clients' over the rounds",
            lambda: draw_evidence(finding.evidence, case, rounds),
            "Band: the clients, min–max and 5–95 %. Marks on top: rounds in which it was found.",
        ),
    ]
    if finding.error is not None:
        blocks.append(Code((finding.error.message[:300], *finding.error.traceback[-8:]), ""))
    suspects = [suspect for suspect in finding.suspects if suspect.node != brief.node][:5]
    if suspects:
        who = (f"suspect {literal(s.node)} ({s.sure}) {literal(s.reason)}" for s in suspects)
        blocks.append(Points(tuple(who)))
    if finding.actions:
        actions = (
            f"{a.status}: {a.kind.replace('_', ' ')} {a.target or ''} (round {a.round})" for a in finding.actions
        )
        blocks += [Heading(4, "What was done"), Points(tuple(literal(text, 300) for text in actions))]
    more: list[Block] = []
    for title, sentences in (("Likely causes", finding.causes), ("What to do", finding.remedies)):
        if sentences:
            more += [Heading(5, title), Points(tuple(sentences), numbered=True)]
    if finding.refutation:
        more += [Heading(5, "What would prove it wrong"), Text(finding.refutation)]
    if finding.trust.words:
        more.append(Text(literal(finding.trust.words), "quiet"))
    if more:
        blocks.append(Folded("Causes, remedies, and what would prove it wrong", tuple(more), 4))
    return Card(brief.severity if brief.severity in MARKS else "note", tuple(blocks))


def marked(severity: str) -> str:
    return f"{MARKS.get(severity, '·')} {literal(severity, 20)}"


def _ratio(row: NumberRow) -> str:
    """Return what was divided by what, if the number is a ratio without a meaning of its own."""
    what = row.compared_as.removeprefix("log").removeprefix(" of ").strip()
    return f" ({literal(what)})" if what and row.compared_as.startswith("log") else ""


def _numbers(finding: FullFinding) -> Table | None:
    if not finding.numbers:
        return None
    rows = tuple(
        (
            literal(row.title or row.name, 80) + _ratio(row),
            with_unit(row.raw_value, row.unit),
            "" if row.raw_usual is None else with_unit(row.raw_usual, row.unit),
            "" if row.usual is None else literal(row.of, 40),
            "" if row.score is None else number(row.score),
        )
        for row in finding.numbers[:10]
    )
    head = ("evidence", "value", "usual", "of", "σ from the others' median")
    keep = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    return Table(
        "",
        tuple(head[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in rows),
        numbers=frozenset(place for place, i in enumerate(keep) if i in (1, 2, 4)),
    )
