# SPDX-License-Identifier: Apache-2.0
"""Routes of a run's findings, and of their marks: acknowledged, muted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import answer, changed
from fedvitals.dashboard.asgi import HttpError, Request, Response, Router
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.errors import ConfigError
from fedvitals.store.marks import clear_mark, set_mark
from fedvitals.store.read import queries
from fedvitals.views import findings as findings_view
from fedvitals.views.cases import case_key, case_of, marked
from fedvitals.views.evidence import Evidence

router = Router("findings")
KeyPath = Annotated[str, Meta(max_length=2000, description="Key of a case, as the list of findings gives it.")]
Name = Annotated[str, Meta(max_length=300)] | None
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Why:
    """Why a finding is muted."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class CaseMarks:
    """The marks that people have set on a case."""

    key: str
    acknowledged: bool
    muted: bool
    reason: str | None


@router.get("/api/runs/{run}/findings", findings_view.Findings)
def findings(
    request: Request,
    run: RunPath,
    state: findings_view.Where = "all",
    severity: Literal["critical", "warning", "note"] | None = None,
    node: Name = None,
    search: Annotated[str, Meta(max_length=200)] = "",
    limit: Annotated[int, Meta(ge=1, le=500)] = 100,
    offset: Annotated[int, Meta(ge=0, le=10**9)] = 0,
    notes: bool = False,
) -> Response:
    """Every trouble once, worst first. `search`: words that all must be in its issue, place or message. `notes`: also
    what never was more than a note.
    """
    asked = findings_view.FindingsAsked(state, severity, node, search, limit, offset, notes)
    return answer(request, run, findings_view.findings_page, asked)


@router.get("/api/runs/{run}/findings/{key:path}/evidence", Evidence)
def evidence(request: Request, run: RunPath, key: KeyPath) -> Response:
    """The values behind one case: its suspects over the other clients."""
    return answer(request, run, findings_view.evidence_of_key, key)


@router.get("/api/runs/{run}/findings/{key:path}", findings_view.FindingDetails)
def finding(request: Request, run: RunPath, key: KeyPath) -> Response:
    """One trouble with its numbers, causes, remedies, and what was done about it."""
    return answer(request, run, findings_view.finding_details, key)


@router.put("/api/runs/{run}/findings/{key:path}/acknowledged", CaseMarks)
def acknowledge(request: Request, run: RunPath, key: KeyPath) -> Response:
    """Somebody knows of it. It stays in the verdict, which says so."""
    return _marked(request, run, key, "acknowledged", "")


@router.delete("/api/runs/{run}/findings/{key:path}/acknowledged", CaseMarks)
def take_back(request: Request, run: RunPath, key: KeyPath) -> Response:
    """As if nobody had acknowledged it."""
    return _marked(request, run, key, "acknowledged", None)


@router.put("/api/runs/{run}/findings/{key:path}/muted", CaseMarks)
def mute(
    request: Request, run: RunPath, key: KeyPath, why: Annotated[Why, Meta(extra={"in": "body"})] | None = None
) -> Response:
    """It does not count in the verdict from now on. The reason is kept."""
    reason = " ".join((why or Why()).reason.split())
    if len(reason) > LONGEST_REASON:
        raise HttpError(422, f"A reason has at most {LONGEST_REASON} characters, got {len(reason)}.")
    return _marked(request, run, key, "muted", reason)


@router.delete("/api/runs/{run}/findings/{key:path}/muted", CaseMarks)
def unmute(request: Request, run: RunPath, key: KeyPath) -> Response:
    return _marked(request, run, key, "muted", None)


def _marked(request: Request, run: str, key: str, kind: str, value: str | None) -> Response:
    """Set the mark of a case, or remove it (None); removing a mark that is not set is no error.

    Only for a run given by its full id: a name or a beginning may mean another run tomorrow.
    """
    cache: ReaderCache = request.app.state.reader_cache
    with cache.reader() as reader:
        try:
            queries.get_run(reader, run)
            known = case_key(case_of(reader, run, key))
        except ConfigError as error:
            raise HttpError(404, str(error)) from error
    if value is None:
        clear_mark(cache.target, run, kind, known)
    else:
        set_mark(cache.target, run, kind, known, value)
    with cache.reader() as reader:
        marks = marked(reader, run)
    return changed(CaseMarks(known, known in marks.acknowledged, known in marks.muted, marks.muted.get(known) or None))
