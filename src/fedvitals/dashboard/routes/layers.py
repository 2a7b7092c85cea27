# SPDX-License-Identifier: Apache-2.0
"""Routes of the page of a run's layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.pages.ridges import Distribution, distribution
from fedvitals.dashboard.routes.parameters import FURTHEST, First, Last, RunPath
from fedvitals.views.layers import LayersPage, layers_page

router = Router("layers")
Family = Literal["gradient", "gradient.full", "update", "weight", "activation"]
Statistic = Literal["rms", "l2", "mean_magnitude", "mean", "std", "absmax", "sparsity", "nans", "infs"]
Node = Annotated[str, Meta(max_length=300, description="A node; none: the federation as a whole.")] | None
Round = (
    Annotated[int, Meta(extra={"name": "round"}, ge=-FURTHEST, le=FURTHEST, description="That must be shown.")] | None
)


@router.get("/api/runs/{run}/layers", LayersPage)
def get_layers(
    request: Request,
    run: RunPath,
    family: Family = "gradient",
    statistic: Statistic = "rms",
    node: Node = None,
    selected: Round = None,
    every_layer: Annotated[
        bool, Meta(extra={"name": "all"}, description="Also biases and norms in the profile.")
    ] = False,
    columns: Annotated[int, Meta(ge=1, le=4000, description="At most so many; more rounds share one.")] = 400,
    first: First = None,
    last: Last = None,
) -> Response:
    """Statistics through the depth and over the rounds; average gradients; dead and saturated units."""
    where: dict[str, Any] = {"node": node, "selected": selected, "first": first, "last": last, "columns": columns}
    return answer(request, run, layers_page, family=family, statistic=statistic, every_layer=every_layer, **where)


@router.get("/api/runs/{run}/layers/distribution", Distribution)
def get_distribution(
    request: Request,
    run: RunPath,
    layer: Annotated[str, Meta(max_length=1000, description="A layer; none: the first.")] | None = None,
    node: Node = None,
    selected: Round = None,
) -> Response:
    """How a layer's gradient was distributed, round by round; where that was not measured, its spread."""
    return answer(request, run, distribution, layer, node, selected)
