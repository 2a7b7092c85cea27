# SPDX-License-Identifier: Apache-2.0
"""Answers requests in a common form: an ETag before any work, JSON for data, one format for errors."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fedvitals.dashboard.asgi import JSON, HttpError, Request, Response
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.errors import FedvitalsError, StoreError
from fedvitals.plain_json import as_builtin
from fedvitals.store.read.queries import find_run
from fedvitals.store.read.reader import Reader
from fedvitals.store.upkeep.doctor import damage_in

logger = logging.getLogger("fedvitals.dashboard")
WORTH_REMEMBERING = 0.005  # seconds of work

CODES = {
    400: "bad_request", 401: "token_needed", 403: "refused", 404: "not_found", 405: "wrong_method", 409: "conflict",
    413: "too_large", 422: "bad_request", 429: "too_many_tries", 503: "store_unreadable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trouble:
    code: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The common format of all errors."""

    error: Trouble


STATUSES = (400, 401, 403, 404, 413, 422, 429, 503)  # statuses with which any request may fail


def answer(
    request: Request,
    run: str | None,
    work: Callable[..., Any],
    *arguments: Any,
    also: str | Callable[[str], str] = "",
    about: Callable[[Reader], Sequence[str]] | None = None,
    **settings: Any,
) -> Response:
    """Return what `work` returns as JSON, or 304 if nothing has changed.

    It is called with the reader, the run's id (unless it is about the whole store), the arguments and the settings. A
    ConfigError means that something requested does not exist: see `failed`. `also`: what changes the answer besides the
    store, such as the hour; for a run, `also(run id)`. `about(reader)`: for the whole store, the runs that matter;
    without it, a change of any run does. Slow answers are cached until the run changes: a second tab, or a returning
    user, does not wait again.
    """
    cache: ReaderCache = request.app.state.reader_cache
    cache.look()
    with cache.reader() as reader:
        run_id = run if run is None or cache.tracker.has_run(run) else find_run(reader, run)
        cache.warming.asked(run_id)
        run_version = cache.tracker.version(run_id)
        version = run_version if about is None else _joint(cache, about(reader))
        version += also if isinstance(also, str) else also(run_id or "")
        headers = {"ETag": f'"{version}"', "Cache-Control": "no-cache"}
        if request.has_current(headers["ETag"]):
            return Response(status=304, headers=headers)
        body = cache.remembered(request.url, version)
        if body is None:
            began = time.perf_counter()
            whose = () if run_id is None else (run_id,)
            body = encode(work(reader, *whose, *arguments, **settings))
            if time.perf_counter() - began > WORTH_REMEMBERING:
                cache.remember(request.url, version, body, run_id, run_version)
    cache.warming.asked(run_id)
    return Response(body, media_type=JSON, headers=headers)


def _joint(cache: ReaderCache, runs: Sequence[str]) -> str:
    versions = "\n".join(f"{run} {cache.tracker.version(run)}" for run in runs)
    return hashlib.blake2b(versions.encode("utf-8", "replace"), digest_size=12).hexdigest()


def encode(value: Any) -> bytes:
    """Encode as JSON; NaN and infinity become null."""
    return msgspec.json.encode(value, enc_hook=lambda unknown: as_builtin(unknown, _refuse))


def _refuse(value: Any) -> Any:
    raise TypeError(f"Cannot answer with a {type(value).__name__}.")


def changed(state: Any) -> Response:
    """Return the answer to a change: the new state, which must not be cached."""
    return Response(encode(state), media_type=JSON, headers={"Cache-Control": "no-store"})


def failure(status: int, message: str, hint: str | None = None, headers: Any = None) -> Response:
    """Return the answer to a request that failed."""
    shape = Failure(Trouble(CODES.get(status, "failed"), message, hint))
    return Response(encode(shape), status, media_type=JSON, headers=headers)


def failed(request: Request, error: Exception) -> Response:
    """Return the answer to a request whose route raised."""
    if isinstance(error, HttpError):
        return failure(error.status, error.message, error.hint, error.headers)
    if isinstance(error, StoreError):
        return failure(503, str(error))
    if isinstance(error, FedvitalsError):
        # A reader has named something that does not exist; a writer has sent something invalid.
        return failure(404 if request.method in ("GET", "HEAD") else 422, str(error))
    damage = damage_in(request.app.state.reader_cache.target)
    if damage is not None:
        return failure(503, damage)
    logger.error("%s %s failed.", request.method, request.path, exc_info=error)
    message = f"The dashboard failed while it answered: {type(error).__name__}."
    return failure(500, message, "The terminal of `fedvitals ui` has the traceback. Training is not concerned.")
