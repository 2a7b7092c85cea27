# SPDX-License-Identifier: Apache-2.0
"""Route of the page of a run's low-rank adapters."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.routes.layers import Round
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.views.adapters import AdaptersPage, adapters_page

router = Router("adapters")


@router.get("/api/runs/{run}/adapters", AdaptersPage)
def get_adapters(
    request: Request,
    run: RunPath,
    layer: Annotated[str, Meta(max_length=1000, description="An adapter; none: the mean over all.")] | None = None,
    selected: Round = None,
    columns: Annotated[int, Meta(ge=1, le=4000, description="At most so many; more rounds share one.")] = 400,
) -> Response:
    """Ranks and spectra over the rounds, errors of the aggregation, the clients' parts, perplexity and tokens."""
    return answer(request, run, adapters_page, layer, selected, columns)
