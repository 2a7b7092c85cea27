# SPDX-License-Identifier: Apache-2.0
"""Routes of a run's findings, and of what people say of them: acknowledged, muted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Body, HTTPException, Path, Query, Request
from fastapi.responses import Response

from fedvitals.dashboard.answers import answer, encode
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.errors import ConfigError
from fedvitals.store.marks import clear_mark, set_mark
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.briefs import marked
from fedvitals.views.cases import case_key, case_of
from fedvitals.views.evidence import Evidence
from fedvitals.views.findings import (
    FindingDetails,
    Findings,
    FindingsAsked,
    Where,
    evidence_of_key,
    finding_details,
    findings_page,
)

router = APIRouter(tags=["findings"])
KeyPath = Annotated[str, Path(max_length=2000, description="Key of a case, as the list of findings gives it.")]
Name = Annotated[str | None, Query(max_length=300)]
LONGEST_REASON = 500
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Why:
    """Why a finding is muted."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class CaseMarks:
    """What is case_marks of a case now."""

    key: str
    acknowledged: bool
    muted: bool
    reason: str | None


@router.get("/api/runs/{run}/findings", response_model=Findings)
def findings(
    request: Request,
    run: RunPath,
    state: Where = "all",
    severity: Literal["critical", "warning", "note"] | None = None,
    node: Name = None,
    search: Annotated[str, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Response:
    """Every trouble once, worst first. `search`: words that all must be in its issue, place or message."""
    asked = FindingsAsked(state, severity, node, search, limit, offset)
    return answer(request, run, lambda reader, run_id: findings_page(reader, run_id, asked))


@router.get("/api/runs/{run}/findings/{key:path}/evidence", response_model=Evidence)
def evidence(request: Request, run: RunPath, key: KeyPath) -> Response:
    """The courses behind one trouble: its suspects over their cohort."""
    return answer(request, run, lambda reader, run_id: _of_key(evidence_of_key, reader, run_id, key))


@router.get("/api/runs/{run}/findings/{key:path}", response_model=FindingDetails)
def finding(request: Request, run: RunPath, key: KeyPath) -> Response:
    """One trouble with its numbers, causes, remedies, and what was done about it."""
    return answer(request, run, lambda reader, run_id: _of_key(finding_details, reader, run_id, key))


def _of_key(work: Callable[[Reader, str, str], T], reader: Reader, run: str, key: str) -> T:
    try:
        return work(reader, run, key)
    except ConfigError as error:
        raise HTTPException(404, str(error)) from error


@router.put("/api/runs/{run}/findings/{key:path}/acknowledged", response_model=CaseMarks)
def acknowledge(request: Request, run: RunPath, key: KeyPath) -> Response:
    """Somebody knows of it. It stays in the verdict, which says so."""
    return _mark(request, run, key, "acknowledged", "")


@router.delete("/api/runs/{run}/findings/{key:path}/acknowledged", response_model=CaseMarks)
def take_back(request: Request, run: RunPath, key: KeyPath) -> Response:
    """As if nobody had acknowledged it."""
    return _unmark(request, run, key, "acknowledged")


@router.put("/api/runs/{run}/findings/{key:path}/muted", response_model=CaseMarks)
def mute(request: Request, run: RunPath, key: KeyPath, why: Annotated[Why | None, Body()] = None) -> Response:
    """It does not count in the verdict from now on. The reason is kept."""
    reason = " ".join((why or Why()).reason.split())
    if len(reason) > LONGEST_REASON:
        raise HTTPException(422, f"A reason has at most {LONGEST_REASON} characters, got {len(reason)}.")
    return _mark(request, run, key, "muted", reason)


@router.delete("/api/runs/{run}/findings/{key:path}/muted", response_model=CaseMarks)
def unmute(request: Request, run: RunPath, key: KeyPath) -> Response:
    return _unmark(request, run, key, "muted")


def _mark(request: Request, run: str, key: str, kind: str, value: str) -> Response:
    known = _known(request, run, key)
    set_mark(request.app.state.reader_cache.target, run, kind, known, value)
    return _marks_of(request, run, known)


def _unmark(request: Request, run: str, key: str, kind: str) -> Response:
    """What was not case_marks is no error to take back."""
    known = _known(request, run, key)
    clear_mark(request.app.state.reader_cache.target, run, kind, known)
    return _marks_of(request, run, known)


def _known(request: Request, run: str, key: str) -> str:
    """The case's own key. Only of a run named by its whole id: a name or a beginning may mean another run tomorrow."""
    with request.app.state.reader_cache.reader() as reader:
        try:
            queries.get_run(reader, run)
            known = case_key(case_of(reader, run, key))
        except ConfigError as error:
            raise HTTPException(404, str(error)) from error
    return known


def _marks_of(request: Request, run: str, key: str) -> Response:
    with request.app.state.reader_cache.reader() as reader:
        marks = marked(reader, run)
    case_marks = CaseMarks(key, key in marks.acknowledged, key in marks.muted, marks.muted.get(key) or None)
    return Response(encode(case_marks), media_type="application/json", headers={"Cache-Control": "no-store"})
