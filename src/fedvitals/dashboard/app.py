# SPDX-License-Identifier: Apache-2.0
"""The dashboard's app: routes, guards, static files."""

from __future__ import annotations

import contextlib
import importlib
import mimetypes
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from fedvitals import __version__
from fedvitals.dashboard.answers import RESPONSES, answer_failures
from fedvitals.dashboard.guard import Guard
from fedvitals.dashboard.live import Live
from fedvitals.dashboard.shelf import Shelf

STATIC = Path(__file__).with_name("static")
ROUTES = ("status", "records", "runs", "overview", "findings", "clients", "layers", "rounds", "compare", "live")
# What a system thinks of these endings is a matter of its configuration; a browser refuses modules of another type.
for _type, _ending in (("text/javascript", ".js"), ("text/css", ".css"), ("image/svg+xml", ".svg")):
    mimetypes.add_type(_type, _ending)


class _Static(StaticFiles):
    """Files that are asked for again each time, and come again only when they have changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


def create_app(store: str | Path | None = None, *, token: str | None = None, hosts: tuple[str, ...] = ()) -> FastAPI:
    """The app over a store. `hosts`: names that it may be called by, besides those of this machine itself.

    With a `token` nothing is shown to who does not have it.
    """
    shelf = Shelf(store)
    live = Live(shelf)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        shelf.warming.want()
        async with live.watching():
            yield
        shelf.close()

    app = FastAPI(
        title="fedvitals",
        version=__version__,
        description="The vital signs of federated learning. Read-only but for tags, acknowledgements and deletions.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # they load their scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=RESPONSES,
    )
    app.state.shelf, app.state.live = shelf, live
    answer_failures(app)
    for name in ROUTES:
        app.include_router(importlib.import_module(f"fedvitals.dashboard.routes_{name}").router)
    app.mount("/static", _Static(directory=STATIC), name="static")

    @app.get("/favicon.ico", include_in_schema=False)
    def icon() -> Response:
        return FileResponse(STATIC / "icon.svg")

    @app.get("/login", include_in_schema=False)
    def login() -> Response:
        return FileResponse(STATIC / "login.html", headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    @app.get("/compare", include_in_schema=False)
    @app.get("/runs/{path:path}", include_in_schema=False)
    def page(path: str = "") -> Response:  # noqa: ARG001 - the page itself reads its address
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    app.add_middleware(Guard, token=token, hosts=hosts)
    return app
