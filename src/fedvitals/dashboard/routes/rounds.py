# SPDX-License-Identifier: Apache-2.0
"""Routes of time, memory and bytes: the profile, one round, and which nodes exchanged messages in it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.pages.costs import Costs, costs
from fedvitals.dashboard.pages.time_costs import Changes, TimeCosts, changes, time_costs
from fedvitals.dashboard.routes.parameters import FURTHEST, First, Last, Names, RunPath
from fedvitals.views.round import RoundPage, RoundTable, round_page, round_table
from fedvitals.views.topology import TopologyPage, topology_page

router = Router("rounds")
Clock = Annotated[Literal["real", "virtual"], Meta(description="Default: the virtual one where there is one.")] | None
Number = Annotated[int, Meta(ge=-FURTHEST, le=FURTHEST, description="A round.")]
Offset = Annotated[int, Meta(ge=0, le=FURTHEST)]


@router.get("/api/runs/{run}/profile", TimeCosts)
def get_profile(
    request: Request, run: RunPath, clock: Clock = None, first: First = None, last: Last = None
) -> Response:
    """What some rounds are bound by, what their time went to, and who held them up; without `from`, the newest."""
    return answer(request, run, time_costs, clock=clock, first=first, last=last)


@router.get("/api/runs/{run}/profile/changes", Changes)
def get_changes(
    request: Request, run: RunPath, clock: Clock = None, first: First = None, last: Last = None
) -> Response:
    """What would have made these rounds shorter: the what-if table and the remedies."""
    return answer(request, run, changes, clock=clock, first=first, last=last)


@router.get("/api/runs/{run}/costs", Costs)
def get_costs(request: Request, run: RunPath) -> Response:
    """Memory by what it is for, traffic by client and kind, and what the machine did."""
    return answer(request, run, costs)


@router.get("/api/runs/{run}/rounds/{number}", RoundPage)
def get_round(
    request: Request,
    run: RunPath,
    number: Number,
    clock: Clock = None,
    sort: Literal["slowest", "name"] = "slowest",
    limit: Annotated[int, Meta(ge=1, le=2000, description="Nodes in the waterfall.")] = 200,
    offset: Offset = 0,
) -> Response:
    """One round: what every node did and when, its critical path, and who waited for whom."""
    return answer(request, run, round_page, number, clock=clock, sort=sort, limit=limit, offset=offset)


@router.get("/api/runs/{run}/rounds/{number}/metrics", RoundTable)
def get_round_metrics(
    request: Request,
    run: RunPath,
    number: Number,
    names: Annotated[Names, Meta(max_length=32, description="Metrics; give the parameter once for each.")] = [],  # noqa: B006 - nobody changes it
    sort: Annotated[str, Meta(max_length=300, description="A metric, the largest first; «-NAME»: the smallest.")] = "",
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100,
    offset: Offset = 0,
) -> Response:
    """The round's metrics, a row a node."""
    return answer(request, run, round_table, number, names, sort=sort, limit=limit, offset=offset)


@router.get("/api/runs/{run}/topology", TopologyPage)
def get_topology(
    request: Request,
    run: RunPath,
    number: Annotated[int, Meta(extra={"name": "round"}, ge=-FURTHEST, le=FURTHEST, description="None: the newest.")]
    | None = None,
    most: Annotated[int, Meta(ge=1, le=5000, description="Of more nodes, clients without findings are counted.")]
    | None = None,
) -> Response:
    """Who talked to whom in a round, how much, and who was ill."""
    return answer(request, run, topology_page, number, most=most)
