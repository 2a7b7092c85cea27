# SPDX-License-Identifier: Apache-2.0
"""Parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator

from fedvitals.dashboard.run_address import run_of_part

FURTHEST = 2**53  # the largest whole number that a browser can say
RunPath = Annotated[
    str,
    Path(
        max_length=1000,
        description="Id of a run, its name, or the beginning of its id. Behind «~» it is percent-encoded twice, for "
        "ids that a path does not keep: with slashes, of dots alone, or beginning with «~».",
    ),
    AfterValidator(run_of_part),
]
Names = list[Annotated[str, Query(min_length=1, max_length=300)]]
First = Annotated[int | None, Query(alias="from", ge=-FURTHEST, le=FURTHEST, description="First round.")]
Last = Annotated[int | None, Query(alias="to", ge=-FURTHEST, le=FURTHEST, description="Last round.")]
