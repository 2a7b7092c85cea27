# SPDX-License-Identifier: Apache-2.0
"""Routes of the list of runs, of tags, and of deletion."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from fedvitals.dashboard.answers import answer, changed
from fedvitals.dashboard.asgi import HttpError, Request, Response, Router
from fedvitals.dashboard.pages.runs import Contents, Order, RunList, RunsAsked, RunsPage, Sort, contents_of
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.dashboard.routes.status import this_moment
from fedvitals.errors import BusyError
from fedvitals.store.marks import clear_mark, marks, set_mark
from fedvitals.store.read.presence import writers
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import has_run
from fedvitals.store.upkeep import retention
from fedvitals.views.status import RunState
from fedvitals.views.verdict import State

router = Router("runs")
_DELETING = threading.Lock()  # a store's own lock works between processes
MOST_TAGS = 20  # of a run
CONFLICT = (409,)
TagPath = Annotated[str, Meta(min_length=1, max_length=40, description="A word or two of a person's own.")]
Text = Annotated[str, Meta(max_length=200)]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a run."""

    id: str
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion."""

    id: str
    name: str
    records: int
    bytes: int  # size of its records
    tape_bytes: int  # and of its tape


@router.get("/api/runs", RunsPage)
def runs(
    request: Request,
    search: Text = "",
    state: RunState | None = None,
    health: State | None = None,
    tag: Annotated[str, Meta(max_length=40)] | None = None,
    sort: Sort = "newest",
    order: Order | None = None,
    limit: Annotated[int, Meta(ge=1, le=200)] = 50,
    offset: Annotated[int, Meta(ge=0, le=10**9)] = 0,
) -> Response:
    """The runs of the store. `search`: words that its name, id, tags, host or topology contain, all of them."""
    asked = RunsAsked(search, state, health, tag, sort, order, limit, offset)
    cache = request.app.state.reader_cache

    run_list: RunList = request.app.state.run_list

    def work(reader: Reader) -> RunsPage:
        return run_list.page(reader, cache.tracker.version, asked, writers(reader))

    return answer(request, None, work, also=this_moment())


@router.get("/api/runs/{run}/contents", Contents)
def contents(request: Request, run: RunPath) -> Response:
    """What would go if the run were deleted."""
    return answer(request, run, contents_of, request.app.state.reader_cache.target)


@router.put("/api/runs/{run}/tags/{tag:path}", Tags, statuses=CONFLICT)
def add_tag(request: Request, run: RunPath, tag: TagPath) -> Response:
    """Give a run a tag."""
    run_id, word = _exact(request, run), " ".join(tag.split())
    if not word or not word.isprintable():
        raise HttpError(422, "A tag needs at least one character, and no invisible ones.")
    known = _tags(request, run_id)
    if word not in known and len(known) >= MOST_TAGS:
        raise HttpError(409, f"A run has at most {MOST_TAGS} tags. Remove one first.")
    set_mark(request.app.state.reader_cache.target, run_id, "tag", word, "")
    return changed(Tags(run_id, _tags(request, run_id)))


@router.delete("/api/runs/{run}/tags/{tag:path}", Tags, statuses=CONFLICT)
def remove_tag(request: Request, run: RunPath, tag: TagPath) -> Response:
    """Take a tag from a run; one that it does not have is no error."""
    run_id = _exact(request, run)
    clear_mark(request.app.state.reader_cache.target, run_id, "tag", tag)
    return changed(Tags(run_id, _tags(request, run_id)))


@router.delete("/api/runs/{run}", Deleted, statuses=CONFLICT)
def delete(request: Request, run: RunPath) -> Response:
    """Delete a run for good. Only by its whole id; refused while it is being written.

    What is written next takes its room. `fedvitals runs delete` gives room back to the disk, for which others wait.
    """
    run_id = _exact(request, run)
    try:
        with _DELETING:
            cleared = retention.delete(request.app.state.reader_cache.target, [run_id], give_back=False)
    except BusyError as error:
        raise HttpError(409, str(error)) from error
    if not cleared.removed:
        raise HttpError(404, f"There is no run '{run_id}' any more.")
    gone = cleared.removed[0]
    return changed(Deleted(run_id, gone.name, gone.rows, gone.bytes, gone.tape_bytes))


def _exact(request: Request, run: str) -> str:
    """Return the run with exactly this id: a name or a beginning of an id may mean another run tomorrow."""
    with request.app.state.reader_cache.reader() as reader:
        if not has_run(reader, run):
            raise HttpError(404, f"There is no run with the id '{run[:100]}'.")
    return run


def _tags(request: Request, run: str) -> tuple[str, ...]:
    with request.app.state.reader_cache.reader() as reader:
        return tuple(sorted(mark.target for mark in marks(reader, run) if mark.kind == "tag"))
