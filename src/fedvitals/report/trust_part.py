# SPDX-License-Identifier: Apache-2.0
"""The report's sections on the run itself, how far to trust its numbers, and what was not measured."""

from __future__ import annotations

import time

from fedvitals.diagnosis.gaps import incomplete
from fedvitals.report.markup import Block, Facts, Heading, Points, Table, Text, literal
from fedvitals.report.settings import flat, readable
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import Card as HealthCard
from fedvitals.views.card import how_often
from fedvitals.views.comparison.runs import flattened
from fedvitals.views.labels import named
from fedvitals.views.profile import Profile
from fedvitals.views.status import status_of
from fedvitals.views.units import number, seconds, size, whole_percent, with_unit
from fedvitals.views.verdict import facts_of

SETTINGS, EVENTS = 120, 10
LONGEST = 200  # characters of a setting


def when(at: float | None) -> str:
    """Return a time in UTC, so that a report is the same wherever it is made."""
    if at is None or not 0 < at < 1e11:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def facts_part(reader: Reader, run: str, card: HealthCard) -> Facts:
    status = status_of(reader, run)
    planned = f" of {status.rounds_planned}" if status.rounds_planned else ""
    shown = [
        ("run", literal(run)),
        ("state", f"{status.state}, begun {when(status.started)}, {seconds(card.summary.seconds)}"),
        ("rounds, clients", f"{status.rounds}{planned}, {status.clients}"),
        ("host, topology", f"{literal(status.host)}, {literal(status.topology or 'not told')}"),
        ("accuracy, loss", f"{with_unit(status.accuracy, 'share')}, {number(status.loss)}"),
        ("a round", seconds(status.round_seconds)),
        ("bytes", f"{size(status.bytes)}{_beside(status.telemetry_bytes)}"),
        ("records lost", str(status.lost)),
        ("measuring took", "–" if card.cost_percent is None else f"{number(card.cost_percent)} % of the rounds' time"),
    ]
    return Facts(tuple(shown))


def _beside(telemetry: int | None) -> str:
    return f", and {size(telemetry)} of telemetry" if telemetry else ""


def configuration_part(card: HealthCard) -> list[Block]:
    run = card.run
    settings = {path: leaf for name, value in flattened(run.config).items() for path, leaf in flat(name, value).items()}
    rows = tuple((literal(name, 80), readable(value)) for name, value in sorted(settings.items())[:SETTINGS])
    more = f"and {len(settings) - SETTINGS} more" if len(settings) > SETTINGS else ""
    tables = [table for table in run.tables if table.rows == "parameter"]
    blocks: list[Block] = [Heading(2, "Configuration and versions")]
    blocks.append(Facts((("seed", "not told" if run.seed is None else str(run.seed)), ("name", literal(run.name, 80)))))
    if rows:
        blocks.append(Table("Settings", ("setting", "value"), rows, more))
    if tables:
        layers = tuple(
            (literal(layer.name, 80), literal("×".join(map(str, layer.shape)) or "1"), literal(layer.dtype, 20))
            for layer in tables[0].layers[:SETTINGS]
        )
        more = f"and {len(tables[0].layers) - SETTINGS} more" if len(tables[0].layers) > SETTINGS else ""
        blocks.append(Table("Model", ("layer", "shape", "type"), layers, more))
    versions = tuple((literal(name, 60), literal(version, LONGEST)) for name, version in sorted(run.versions.items()))
    blocks.append(Table("Versions", ("package", "version"), versions) if versions else Text("No versions were told."))
    return blocks


def trust_part(reader: Reader, run: str, card: HealthCard, profile: Profile) -> list[Block]:
    """Return what the judgement rests on, and what was not examined."""
    facts = facts_of(reader, run)
    alarms = facts.false_alarms * facts.rounds / 100
    level, allowed = card.privacy.split(": ", 1)
    cost = "an unknown share" if card.cost_percent is None else f"{number(card.cost_percent)} %"
    everywhere = "" if card.gaps else " at every round"
    points = [
        f"{card.detectors} detectors looked{everywhere}; at {number(facts.false_alarms)} per 100 healthy rounds, "
        f"{number(alarms)} false alarms are to be expected in {facts.rounds} rounds."
        if card.detectors
        else "No detector looked at this run while it trained.",
        f"Records lost: {card.summary.lost}." + (" What they said is not in here." if card.summary.lost else ""),
        f"Measuring took {cost} of the rounds' time.{f' {how_often(card)}' if card.measured else ''}",
        f"Privacy level {level}: {allowed}."
        + (f" Sums are of at least {card.cohort} clients." if card.cohort is not None else ""),
    ]
    if card.gaps:
        points.insert(1, literal(incomplete(card.gaps)))
    if card.run.finished is None:
        points.append("The run was still open when this was written.")
    if profile.unaccounted is not None and profile.unaccounted > 0.05:
        points.append(
            f"Of a node's round, up to {whole_percent(profile.unaccounted)} is in no known part (median over rounds)."
        )
    points.append("Lines of more than 240 points are drawn in buckets that keep their lowest and highest value.")
    blocks: list[Block] = [Heading(2, "How sure, and what was not measured"), Points(tuple(points))]
    if card.absent:
        rows = tuple((f"`{names}`", needs) for names, needs in card.absent.items())
        blocks.append(Table("Not measured", ("metrics", "what they need"), rows))
    if card.events:
        events = tuple(
            (str(event.where.round if event.where.round is not None else "–"),
             literal(named(event.where.node or "–", card.labels), 60), literal(event.level),
             literal(event.message, 300))
            for event in card.events[-EVENTS:]
        )  # fmt: skip
        note = f"the newest of {len(card.events)}" if len(card.events) > EVENTS else ""
        blocks.append(Table("Warnings and errors", ("round", "node", "level", "message"), events, note))
    return blocks
