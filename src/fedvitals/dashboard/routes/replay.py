# SPDX-License-Identifier: Apache-2.0
"""Routes of a run's tape: its index, one round of it, and what-if questions.

Read-only, and nothing is trained here: what is not on the tape is left to the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.pages.replay import ReplayIndex, ReplayRound, replay_index, replay_round
from fedvitals.dashboard.pages.tape_index import sign_of
from fedvitals.dashboard.pages.what_if import WhatIf, what_if
from fedvitals.dashboard.routes.parameters import FURTHEST, RunPath
from fedvitals.store import Target
from fedvitals.store.read.reader import Reader

router = Router("replay")
Number = Annotated[int, Meta(ge=0, le=FURTHEST, description="A round on the tape.")]
Rule = Literal[
    "recorded", "fedavg", "median", "trimmed_mean", "geometric_median", "norm_clipping", "krum", "multi_krum"
]
Sort = Literal["trouble", "-trouble", "name", "-name", "weight", "-weight", "norm", "-norm", "first", "-first", "last",
               "-last"]  # fmt: skip


def taped(request: Request, run: str, work: Callable[..., Any], *arguments: Any, **settings: Any) -> Response:
    """Like `answer`, with the content of the tape included in the ETag."""
    store: Target = request.app.state.reader_cache.target

    def read(reader: Reader, run: str) -> Any:
        return work(reader, store, run, *arguments, **settings)

    return answer(request, run, read, also=lambda run: f"-{sign_of(store, run)}")


@router.get("/api/runs/{run}/replay", ReplayIndex)
def get_replay(request: Request, run: RunPath) -> Response:
    """Which rounds are on the tape and how, with findings and failures; without a tape, how to get one."""
    return taped(request, run, replay_index)


@router.get("/api/runs/{run}/replay/{number}", ReplayRound)
def get_replay_round(
    request: Request,
    run: RunPath,
    number: Number,
    node: Annotated[str, Meta(max_length=1000, description="A client, to be compared with the others.")] | None = None,
    sort: Sort = "trouble",
    limit: Annotated[int, Meta(ge=1, le=500, description="Clients in the table.")] = 50,
    offset: Annotated[int, Meta(ge=0, le=FURTHEST)] = 0,
) -> Response:
    """The state at a round: model, layers, metrics, who answered and how; and the commands that run it again."""
    return taped(request, run, replay_round, number, node or None, sort=sort, limit=limit, offset=offset)


@router.get("/api/runs/{run}/replay/{number}/whatif", WhatIf)
def get_what_if(
    request: Request,
    run: RunPath,
    number: Number,
    drop: Annotated[
        str, Meta(max_length=20_000, description="Clients to leave out: each percent-encoded, commas between them.")
    ] = "",
    rule: Rule = "recorded",
) -> Response:
    """The round aggregated otherwise, from whole updates on the tape; if they are missing, the answer says so."""
    nodes = tuple(dict.fromkeys(unquote(node) for node in drop.split(",") if node))
    return taped(request, run, what_if, number, drop=nodes, rule=rule)
