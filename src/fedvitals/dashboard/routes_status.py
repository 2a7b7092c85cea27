# SPDX-License-Identifier: Apache-2.0
"""What stands on the edge of every page: which run, how far, how many records lost, what measuring cost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from fedvitals.dashboard.answers import answer
from fedvitals.views.status import Status, StoreStatus, status_of, store_status

router = APIRouter(tags=["status"])
RunPath = Annotated[str, Path(max_length=300, description="Id of a run, its name, or the beginning of its id.")]


@router.get("/api/store", response_model=StoreStatus)
def store(request: Request) -> Response:
    """The store that is shown."""
    shown = request.app.state.shelf.shown
    return answer(request, None, lambda reader: store_status(reader, shown))


@router.get("/api/runs/{run}", response_model=Status)
def status(request: Request, run: RunPath) -> Response:
    """One run: its state, progress, settings, and what of it was measured."""
    return answer(request, run, status_of)
