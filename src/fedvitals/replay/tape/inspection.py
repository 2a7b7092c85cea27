# SPDX-License-Identifier: Apache-2.0
"""Examines a tape: can all of it be read, and is it what was written?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedvitals.errors import FedvitalsError
from fedvitals.replay.tape.journal import RoundJournal, round_ranges
from fedvitals.replay.tape.objects import StateFiles


def problems_of(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of a tape that is damaged, and for rounds that are missing.

    Every state is unpacked and compared with its digest. One that is not there may have been removed to stay within
    the tape's budget, and is run again.
    """
    journal, states = RoundJournal(folder), StateFiles(folder / "objects")
    try:
        journal.setting()
    except FedvitalsError as error:
        yield str(error)
    rounds = journal.rounds()
    missing = sorted({*range(rounds[0], rounds[-1] + 1)} - {*rounds}) if rounds else []
    if missing:
        yield f"Rounds are missing from the tape in {folder}: {round_ranges(missing)}."
    for round_index in rounds:
        try:
            journal.read(round_index)
        except FedvitalsError as error:
            yield str(error)
    for digest in states:
        try:
            states.get(digest)
        except FedvitalsError as error:
            yield str(error)
