# SPDX-License-Identifier: Apache-2.0
"""Routes of clients: the table of all, the page of one, the map of updates.

A client's name is a query parameter: it may contain slashes, dots and question marks, which a path does not preserve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import HttpError, Request, Response, Router
from fedvitals.dashboard.pages import client as client_pages
from fedvitals.dashboard.pages.layer_deviation import ClientLayers, client_layers
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.dashboard.routes.overview import Points
from fedvitals.dashboard.routes.parameters import First, Last, RunPath
from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.store.read.nodes import has_node
from fedvitals.store.read.reader import Reader
from fedvitals.views.clients import ClientsPage, Roster, clients_page, severities
from fedvitals.views.update_map import Kind, Layouts, UpdateMap, update_map

router = Router("clients")
Node = Annotated[str, Meta(min_length=1, max_length=1000, description="Name of a client.")]
Word = Annotated[str, Meta(max_length=200)] | None
Sort = Literal[
    "worst", "name", "group", "attended", "last_seen", "loss", "norm", "cosine", "score", "seconds", "bytes",
    "failures", "findings",
]  # fmt: skip
Health = Literal["ill", "well", "failed", "critical", "warning", "note"]


@router.get("/api/runs/{run}/clients", ClientsPage)
def clients(
    request: Request,
    run: RunPath,
    sort: Sort = "worst",
    descending: bool = False,
    search: Annotated[str, Meta(max_length=200, description="Part of a name.")] = "",
    group: Annotated[str, Meta(max_length=1000)] | None = None,
    health: Health | None = None,
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100,
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0,
) -> Response:
    """A page of the table of clients."""
    wanted: dict[str, Any] = {
        "sort": sort, "descending": descending, "search": search, "group": group, "health": health,
        "limit": limit, "offset": offset,
    }  # fmt: skip
    return answer(request, run, lambda reader, run_id: clients_page(_roster(request, reader, run_id), **wanted))


@router.get("/api/runs/{run}/client", client_pages.ClientPage)
def client(request: Request, run: RunPath, node: Node) -> Response:
    """One client: verdict, findings, facts, failures, events, and its neighbours in the order of trouble."""

    def work(reader: Reader, run_id: str, node: str) -> client_pages.ClientPage:
        return client_pages.client_page(reader, run_id, node, _roster(request, reader, run_id).rows)

    return answer(request, run, _of_client, work, node)


@router.get("/api/runs/{run}/client/signs", list[client_pages.ClientSign])
def signs(
    request: Request, run: RunPath, node: Node, points: Points = 500, first: First = None, last: Last = None
) -> Response:
    """Its vital signs over the rounds, the most deviating first."""
    return answer(request, run, _of_client, client_pages.client_signs, node, points, first, last)


@router.get("/api/runs/{run}/client/layers", ClientLayers)
def layers(
    request: Request,
    run: RunPath,
    node: Node,
    family: Word = None,
    statistic: Word = None,
    first: First = None,
    last: Last = None,
) -> Response:
    """Its layers against the median client's, by round."""
    return answer(request, run, _of_client, client_layers, node, family, statistic, first, last)


@router.get("/api/runs/{run}/client/times", client_pages.ClientTimes)
def times(request: Request, run: RunPath, node: Node, first: First = None, last: Last = None) -> Response:
    """Where its time went, by round."""
    return answer(request, run, _of_client, client_pages.client_times, node, first, last)


@router.get("/api/runs/{run}/map", UpdateMap)
def map_of_updates(
    request: Request,
    run: RunPath,
    round: Annotated[int, Meta(ge=-(2**62), le=2**62, description="None: the newest.")] | None = None,  # noqa: A002
    node: Annotated[str, Meta(max_length=1000, description="Whose path is returned.")] | None = None,
    plane: Annotated[Kind, Meta(description="That all rounds share, or the round's own.")] = "run",
) -> Response:
    """The updates of a round in a plane, and their cosines."""

    def work(reader: Reader, run_id: str) -> UpdateMap:
        layouts: Layouts = request.app.state.reader_cache.layouts  # here, because those of a replaced store are gone
        history = reader.history(run_id)
        rounds = history.rounds()
        about = {"severities": severities(reader, run_id), "groups": groups_of(history, rounds[-1]) if rounds else {}}
        return update_map(reader, run_id, layouts, round_index=round, node=node, kind=plane, **about)

    return answer(request, run, work)


def _roster(request: Request, reader: Reader, run: str) -> Roster:
    cache: ReaderCache = request.app.state.reader_cache
    return cache.rosters.roster(reader, run, cache.tracker.version(run))


def _of_client(reader: Reader, run: str, work: Callable[..., Any], node: str, *arguments: Any) -> Any:
    """Return what `work` returns for a client; 404 if the run has no such node."""
    if not has_node(reader, run, node):
        raise HttpError(404, f"The run {run} has no client '{node}'.")
    return work(reader, run, node, *arguments)
