# SPDX-License-Identifier: Apache-2.0
"""The report's verdict, its advice, and every finding with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from fedvitals.diagnosis.cases import Case, notes_in_words
from fedvitals.plot.finding_evidence import draw_evidence
from fedvitals.report.markup import Block, Card, Code, Facts, Heading, Pictures, Points, Table, Text, literal
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

FULL = 8  # cases with evidence and advice; the others are lines of a table
LISTED = 60
ADVICE = 5  # cases whose first remedy stands among what to do
SAVING = 0.05  # share of a round that a change must save to be worth naming
MARKS = {"critical": "■", "warning": "▲", "note": "·"}
STATES = {
    "ill": "Problem",
    "watch": "Watch",
    "healthy": "OK",
    "warming": "Too early",
    "unjudged": "Not judged",
}


def verdict_card(verdict: Verdict) -> Card:
    blocks: list[Block] = [Text(f"{STATES[verdict.state]} · {literal(verdict.headline)}", "lead")]
    if verdict.detail:
        blocks.append(Text(literal(verdict.detail)))
    return Card(f"verdict {verdict.state}", tuple(blocks))


def what_next(findings: Findings, full: Sequence[FullFinding], profile: Profile, run: str) -> list[Block]:
    """Return what to do next, in order: about open findings, then about time, then where to look closer."""
    points: list[str] = []
    open_ = [finding for finding in full if finding.case.still_there and not finding.case.muted]
    urgent = [finding for finding in open_ if finding.case.now != "note" and finding.remedies][:ADVICE]
    points += [
        f"**{literal(finding.case.place)}** ({literal(finding.case.title)}): {finding.remedies[0]}"
        for finding in urgent
    ]
    cards = [finding.case for finding in open_]
    notes = [f"{literal(card.place)} ({literal(card.sure)})" for card in cards if card.now == "note"]
    if notes:
        points.append(f"Nothing yet about {', '.join(notes)}: only notes. Watch whether they come back.")
    if findings.verdict.state == "unjudged":
        points.append(
            f"{literal(findings.verdict.headline)} The command below lets the detectors look at what is stored."
        )
    for remedy in [remedy for remedy in profile.remedies if remedy.share >= SAVING][:2]:
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
    return [Heading(2, "What to do next"), Points(tuple(points), numbered=len(points) > 1), commands]


def findings_part(reader: Reader, run: str, pictures: Pictures) -> tuple[Findings, list[FullFinding], list[Block]]:
    """Return the findings as data, and the section about them."""
    findings = findings_page(reader, run, FindingsAsked(limit=LISTED))
    by_key = {case_key(case): case for case in cases_of(reader, run)}
    rounds = reader.history(run).rounds()
    chosen = findings.cases[:FULL]
    full = [full_finding(reader, run, card.key) for card in chosen]
    blocks: list[Block] = [Heading(2, "Findings")]
    if not findings.total:
        unjudged = findings.verdict.state == "unjudged"
        blocks.append(Text(f"None. {literal(findings.verdict.headline)}" if unjudged else "None."))
        return findings, full, [*blocks, *_hidden_notes(findings, run)]
    counts = findings.counts
    muted = f", {counts.muted} muted" if counts.muted else ""
    blocks.append(Text(f"{counts.all} in all: {counts.open} open, {counts.past} over{muted}. Worst first."))
    blocks += _hidden_notes(findings, run)
    blocks += [_card(finding, by_key[finding.case.key], rounds, pictures) for finding in full]
    rest = [card for card in findings.cases if card.key not in {finding.case.key for finding in full}]
    if rest:
        more = findings.total - len(findings.cases)
        blocks.append(_list(rest, f"and {more} more: `fedvitals findings`" if more > 0 else ""))
    return findings, full, blocks


def _hidden_notes(findings: Findings, run: str) -> list[Block]:
    """Return one line for notes, which are shown on request only."""
    how = f"`fedvitals findings {literal(run)} --notes`"
    return [Text(f"{notes_in_words(findings.notes)}: {how}", "quiet")] if findings.notes else []


def _list(rest: Sequence[CaseCard], note: str) -> Table:
    rows = tuple(
        (marked(card.severity), literal(card.title), literal(card.place), literal(card.sure), literal(card.course))
        for card in rest
    )  # fmt: skip
    return Table("The other findings", ("severity", "what", "where", "how sure", "when"), rows, note, frozenset({3}))


def _card(finding: FullFinding, case: Case, rounds: Sequence[int], pictures: Pictures) -> Card:
    brief = finding.case
    state = " · muted" if brief.muted else " · acknowledged" if brief.acknowledged else ""
    exact = ", an exact test" if finding.exact else ""
    # A name for files and ids: a key may contain any character.
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in brief.key)[:40].strip("-").lower() or "case"
    facts = (
        ("issue", literal(brief.issue)),
        ("severity", f"{literal(brief.severity)}{state}"),
        ("when", literal(brief.course)),
        ("how sure", f"{literal(brief.sure)}{exact}"),
        *((("of what", literal(levels_in_words(case))),) if brief.levels else ()),
        *(
            (("or else", literal(", ".join(f"{i} {whole_percent(p)}" for i, p in brief.alternatives))),)
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
            f"{literal(brief.title)} of {literal(brief.place)}: its signs against its peers' over the rounds",
            lambda: draw_evidence(finding.evidence, case, rounds),
            "Band: the clients, min–max and 5–95 %. Marks on top: rounds in which it was found.",
        ),
    ]
    if finding.error is not None:
        blocks.append(Code((finding.error.message[:300], *finding.error.traceback[-8:]), ""))
    if finding.suspects:
        who = (f"suspect {literal(s.node)} ({number(s.score)}) {literal(s.reason)}" for s in finding.suspects[:5])
        blocks.append(Points(tuple(who)))
    for title, sentences in (("Likely causes", finding.causes), ("What to do", finding.remedies)):
        if sentences:
            blocks += [Heading(4, title), Points(tuple(sentences), numbered=True)]
    if finding.refutation:
        blocks += [Heading(4, "What would prove it wrong"), Text(finding.refutation)]
    if finding.actions:
        actions = (f"{a.status}: {a.kind} {a.target or ''} (round {a.round}) {a.why}" for a in finding.actions)
        blocks += [Heading(4, "What was done"), Points(tuple(literal(text, 300) for text in actions))]
    if finding.trust.words:
        blocks.append(Text(literal(finding.trust.words), "quiet"))
    return Card(brief.severity if brief.severity in MARKS else "note", tuple(blocks))


def marked(severity: str) -> str:
    return f"{MARKS.get(severity, '·')} {literal(severity, 20)}"


def _ratio(row: NumberRow) -> str:
    """What was divided by what, where the number is no sign by itself."""
    what = row.compared_as.removeprefix("log").removeprefix(" of ").strip()
    return f" ({literal(what)})" if what and row.compared_as.startswith("log") else ""


def _compared(row: NumberRow) -> str:
    """On which scale the two were compared, and what they are there."""
    if not row.compared_as:
        return ""
    against = "" if row.usual is None else f" against {number(row.usual)}"
    return (
        f"{'log' if row.compared_as.startswith('log') else literal(row.compared_as, 40)}: {number(row.value)}{against}"
    )


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
            _compared(row),
        )
        for row in finding.numbers[:10]
    )
    head = ("evidence", "value", "usual", "of", "σ from the others' median", "compared as")
    keep = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    return Table(
        "",
        tuple(head[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in rows),
        numbers=frozenset(place for place, i in enumerate(keep) if i in (1, 2, 4)),
    )
