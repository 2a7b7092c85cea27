# SPDX-License-Identifier: Apache-2.0
"""Route of server-sent events about runs that have changed."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse

router = APIRouter()


@router.get("/api/live", include_in_schema=False)  # a stream without an end is nothing that a schema can say
async def live(request: Request) -> StreamingResponse:
    if request.app.state.live.full:
        raise HTTPException(503, "Too many pages are open on this dashboard. Close some.")
    return StreamingResponse(
        request.app.state.live.events(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
