# SPDX-License-Identifier: Apache-2.0
"""Builds the dashboard's app from routes, guards and static files."""

from __future__ import annotations

import contextlib
import importlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from fedvitals import __version__
from fedvitals.dashboard import files
from fedvitals.dashboard.answers import RESPONSES, answer_failures
from fedvitals.dashboard.connections import Limits
from fedvitals.dashboard.guard import Guard
from fedvitals.dashboard.live import Live
from fedvitals.dashboard.pages.runs import RunList
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.views.memo import Remembered
from fedvitals.views.run_figures import Figures

COMPARED = 80  # runs whose figures are remembered
ROUTES = (
    "status", "records", "runs", "overview", "findings", "clients", "layers", "adapters", "rounds", "replay", "compare",
    "report",
)  # fmt: skip


def create_app(
    store: str | Path | None = None,
    *,
    token: str | None = None,
    private: bool = False,
    hosts: tuple[str, ...] = (),
    proxy_hosts: tuple[str, ...] = (),
    root: str = "",
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> FastAPI:
    """Build the app over a store. `hosts`: names that it may be called by, besides those of this machine itself.

    `proxy_hosts`: names that a reverse proxy shows it by. `root`: the path that it has there, e.g. "/fedvitals";
    requests may come with or without it.

    Only who has the `token` can change anything; without one, nobody can. `private`: nor can others read anything.
    """
    cache = ReaderCache(store)
    live = Live(cache, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _prepare(app)
        cache.warming.want()
        async with live.watching():
            yield
        cache.close()

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
    app.state.reader_cache, app.state.live = cache, live
    app.state.run_list, app.state.compared = RunList(), Remembered[str, Figures](COMPARED)
    answer_failures(app)
    for name in ROUTES:
        app.include_router(importlib.import_module(f"fedvitals.dashboard.routes.{name}").router)
    app.router.routes[:0] = files.routes(root)  # before all others: these are asked for most
    app.router.routes += files.routes(root, last=True)
    app.add_middleware(
        Guard,
        token=token or secrets.token_urlsafe(24),
        private=private,
        hosts=hosts,
        proxy_hosts=proxy_hosts,
        root=root,
    )
    return app


def _prepare(app: FastAPI) -> None:
    """FastAPI makes what a route needs when it first looks for one: 0.3 s that the first page would wait for."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/api/", "root_path": "", "headers": []})
