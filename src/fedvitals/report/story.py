# SPDX-License-Identifier: Apache-2.0
"""The report on one run: the verdict, what it rests on, and what was not examined."""

from __future__ import annotations

from fedvitals import __version__
from fedvitals.report.cost_part import cost_part
from fedvitals.report.findings_part import findings_part, verdict_card, what_next
from fedvitals.report.markup import Block, Heading, literal
from fedvitals.report.pictures import Pictures
from fedvitals.report.signs_part import clients_part, layers_part, learning_part
from fedvitals.report.trust_part import configuration_part, facts_part, trust_part
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import health_card
from fedvitals.views.profile import profile_of
from fedvitals.views.verdict import Verdict

FOOT = (
    f"Written by fedvitals {__version__} out of the run's store. This file needs nothing else: no network, no script."
)


def story(reader: Reader, run: str, pictures: Pictures) -> tuple[Verdict, list[Block]]:
    """Return the verdict, and the whole report as blocks."""
    card, profile = health_card(reader, run), profile_of(reader, run)
    findings_data, full, findings = findings_part(reader, run, pictures)
    blocks: list[Block] = [
        Heading(1, literal(card.run.name or run, 120)),
        verdict_card(findings_data.verdict),
        facts_part(reader, run, card),
        *what_next(findings_data, full, profile, run),
        *findings,
        *learning_part(reader, run, card, pictures),
        *clients_part(reader, run, pictures),
        *layers_part(reader, run, pictures),
        *cost_part(reader, run, profile, pictures),
        *configuration_part(card),
        *trust_part(reader, run, card, profile),
    ]
    return findings_data.verdict, blocks
