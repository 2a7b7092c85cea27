# SPDX-License-Identifier: Apache-2.0
"""Parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from fedvitals.dashboard.run_address import run_of_part

FURTHEST = 2**53  # the largest integer that a browser can represent
RunPath = Annotated[
    str,
    Meta(
        extra={"convert": run_of_part},
        max_length=1000,
        description="Id of a run, its name, or the beginning of its id. Behind «~» it is percent-encoded twice, for "
        "ids that a path does not keep: with slashes, of dots alone, or beginning with «~».",
    ),
]
Names = list[Annotated[str, Meta(min_length=1, max_length=300)]]
First = Annotated[int, Meta(extra={"name": "from"}, ge=-FURTHEST, le=FURTHEST, description="First round.")] | None
Last = Annotated[int, Meta(extra={"name": "to"}, ge=-FURTHEST, le=FURTHEST, description="Last round.")] | None
