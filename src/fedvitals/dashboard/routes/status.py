# SPDX-License-Identifier: Apache-2.0
"""Routes of what every page shows in its header and footer: the store, the state of a run, and which runs changed."""

from __future__ import annotations

import time

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Route, Router, Stream
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.store.read.reader import Reader
from fedvitals.views.status import Status, StoreStatus, status_of, store_status

router = Router("status")


def this_moment() -> str:
    """Return a version for answers that change without a change in the store, as when a run dies."""
    return f".{int(time.time() // 5)}"


@router.get("/api/store", StoreStatus)
def store(request: Request) -> Response:
    """The store that is shown."""
    return answer(request, None, store_status, request.app.state.reader_cache.shown)


@router.get("/api/runs/{run}", Status)
def status(request: Request, run: RunPath) -> Response:
    """One run: its state, progress, settings, and what of it was measured."""

    def work(reader: Reader, run_id: str) -> Status:
        return status_of(reader, run_id)

    return answer(request, run, work, also=this_moment())


async def live(request: Request) -> Stream:
    return Stream(
        request.app.state.live.events(request.client),
        media_type="text/event-stream; charset=utf-8",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


router.routes.append(Route("/api/live", live, ("GET",)))  # not in the schema, which cannot describe an endless stream
