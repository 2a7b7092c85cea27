# SPDX-License-Identifier: Apache-2.0
"""Builds the dashboard's app from routes, guards and static files."""

from __future__ import annotations

import contextlib
import functools
import importlib
import secrets
import types
from collections.abc import AsyncIterator
from pathlib import Path

from fedvitals import __version__
from fedvitals.dashboard import files
from fedvitals.dashboard.answers import STATUSES, Failure, encode, failed
from fedvitals.dashboard.asgi import JSON, App, Request, Response, Route
from fedvitals.dashboard.connections import Limits
from fedvitals.dashboard.guard import Guard
from fedvitals.dashboard.live import Live
from fedvitals.dashboard.pages.runs import RunList
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.views.memo import Remembered
from fedvitals.views.run_figures import Figures

COMPARED = 80  # runs whose figures are cached
DESCRIPTION = "Observability for federated learning. Read-only but for tags, acknowledgements and deletions."
PACKAGE = "fedvitals.dashboard.routes"
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
    ahead: bool = False,
) -> App:
    """Build the app over a store. `hosts`: names that it may be called by, besides those of this machine.

    `proxy_hosts`: host names under which a reverse proxy serves it. `root`: its path there, e.g. "/fedvitals"; requests
    may come with or without it.

    Only requests with the `token` can change anything; without a token, none can. `private`: reading needs it too.
    `ahead`: begin to read the store at once, while the routes are imported; else once the app starts.
    """
    cache = ReaderCache(store)
    if ahead:
        cache.warming.want()
    live = Live(cache, limits)

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        cache.warming.want()
        async with live.watching():
            yield
        cache.close()

    def openapi(request: Request) -> Response:
        return Response(encode(request.app.openapi()), media_type=JSON)

    api = [route for name in ROUTES for route in importlib.import_module(f"{PACKAGE}.{name}").router.routes]
    return App(
        # Files come first, as they are requested most.
        [*files.routes(root), *api, Route("/api/openapi.json", openapi), *files.routes(root, last=True)],
        guard=functools.partial(
            Guard,
            token=token or secrets.token_urlsafe(24),
            private=private,
            hosts=hosts,
            proxy_hosts=proxy_hosts,
            root=root,
        ),
        failed=failed,
        lifespan=lifespan,
        state=types.SimpleNamespace(
            reader_cache=cache, live=live, run_list=RunList(), compared=Remembered[str, Figures](COMPARED)
        ),
        description={"title": "fedvitals", "version": __version__, "description": DESCRIPTION},
        failure=Failure,
        statuses=STATUSES,
    )
