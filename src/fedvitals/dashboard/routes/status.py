# SPDX-License-Identifier: Apache-2.0
"""Routes of what every page shows at its edges: the store, the state of a run, and which runs have changed."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.store.read.reader import Reader
from fedvitals.views.status import Status, StoreStatus, status_of, store_status

router = APIRouter(tags=["status"])


def this_moment() -> str:
    """For answers that change without a change in the store: a run dies."""
    return f".{int(time.time() // 5)}"


@router.get("/api/store", response_model=StoreStatus)
def store(request: Request) -> Response:
    """The store that is shown."""
    return answer(request, None, store_status, request.app.state.reader_cache.shown)


@router.get("/api/runs/{run}", response_model=Status)
def status(request: Request, run: RunPath) -> Response:
    """One run: its state, progress, settings, and what of it was measured."""

    def work(reader: Reader, run_id: str) -> Status:
        return status_of(reader, run_id)

    return answer(request, run, work, also=this_moment())


@router.get("/api/live", include_in_schema=False)  # a stream without an end is nothing that a schema can say
async def live(request: Request) -> StreamingResponse:
    return StreamingResponse(
        request.app.state.live.events(request.client.host if request.client else ""),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
