# SPDX-License-Identifier: Apache-2.0
"""Routes of the overview of a run, and of signs over its rounds that other pages show as well."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.routes.parameters import FURTHEST, First, Last, Names, RunPath
from fedvitals.store.read.reader import Reader
from fedvitals.views.grid import Grid
from fedvitals.views.heat import Sort, client_grid, layer_grid
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.overview import Overview, overview
from fedvitals.views.phases import Phases, phases
from fedvitals.views.series import Band, Series, band, median_series, several_series

router = Router("overview")
Sign = Annotated[str, Meta(min_length=1, max_length=300, description="Name of a metric.")]
Signs = Annotated[Names, Meta(max_length=16, description="Names of metrics; give the parameter once for each.")]
Nodes = Annotated[Names, Meta(max_length=16, description="Nodes whose own values are wanted; none: the federation's.")]
Points = Annotated[int, Meta(ge=1, le=4000, description="At most so many; more rounds share buckets.")]


@router.get("/api/runs/{run}/overview", Overview)
def get_overview(request: Request, run: RunPath) -> Response:
    """The verdict, troubles in short, suspects, and which signs there are."""
    return answer(request, run, overview)


@router.get("/api/runs/{run}/series", list[Series])
def get_series(
    request: Request,
    run: RunPath,
    names: Signs,
    nodes: Nodes = [],  # noqa: B006 - never modified
    points: Points = 1000,
    first: First = None,
    last: Last = None,
) -> Response:
    """Signs of the federation (its own value, else the server's, else the median client's), or of some nodes."""

    def work(reader: Reader, run: str) -> list[Series]:
        lines = several_series(reader, run, names, nodes or [None], points, first, last)
        if nodes:
            return lines
        return [
            line if line.total else median_series(line.name, metric_matrix(reader, run, line.name), points, first, last)
            for line in lines
        ]

    return answer(request, run, work)


@router.get("/api/runs/{run}/band", Band)
def get_band(
    request: Request, run: RunPath, sign: Sign, points: Points = 1000, first: First = None, last: Last = None
) -> Response:
    """How a sign was spread over the clients: smallest, p5, median, p95, largest."""
    return answer(request, run, lambda reader, run: band(sign, metric_matrix(reader, run, sign), points, first, last))


@router.get("/api/runs/{run}/grid", Grid)
def get_grid(
    request: Request,
    run: RunPath,
    sign: Sign,
    sort: Sort = "worst",
    offset: Annotated[int, Meta(ge=0, le=FURTHEST)] = 0,
    rows: Annotated[int, Meta(ge=1, le=2000)] = 1000,
    columns: Points = 500,
    first: First = None,
    last: Last = None,
) -> Response:
    """A sign of all clients over the rounds, as a heat map has it."""
    page: dict[str, Any] = {"offset": offset, "limit": rows, "columns": columns}
    return answer(request, run, client_grid, sign, sort=sort, first=first, last=last, **page)


@router.get("/api/runs/{run}/layer-grid", Grid)
def get_layer_grid(
    request: Request,
    run: RunPath,
    family: Annotated[str, Meta(max_length=100)] = "gradient",
    statistic: Annotated[str, Meta(max_length=100)] = "l2",
    columns: Points = 500,
    first: First = None,
    last: Last = None,
) -> Response:
    """A statistic of the federation's layers over the rounds, in the order of the model."""
    return answer(request, run, layer_grid, family, statistic, first=first, last=last, columns=columns)


@router.get("/api/runs/{run}/phases", Phases)
def get_phases(
    request: Request, run: RunPath, points: Points = 500, first: First = None, last: Last = None
) -> Response:
    """What the rounds' time went to, and their bytes."""
    return answer(request, run, phases, points, first, last)
