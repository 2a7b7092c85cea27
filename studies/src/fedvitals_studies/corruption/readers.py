# SPDX-License-Identifier: Apache-2.0
"""Queries every reader of a store, and the doctor: command line, dashboard, tape, and the records waiting beside it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.testclient import TestClient

from fedvitals.cli.main import main
from fedvitals.dashboard.app import create_app
from fedvitals.errors import FedvitalsError
from fedvitals.replay.tape.digests import digest_of
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.store import checksums, sqlite
from fedvitals.transport.spill import drain_spill

HOME = "http://127.0.0.1:7979"
FAILED, CRASHED = "failed", "crashed"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a reader; `state` is "ok", FAILED (with a reason) or CRASHED (a traceback)."""

    state: str
    text: str


def forget() -> None:
    """Forget which files were found undamaged: each damaged copy is a new store, but may reuse the inode of another."""
    checksums._SOUND.clear()  # noqa: SLF001
    sqlite._looked_at.clear()  # noqa: SLF001


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings about the damage out of the terminal."""
    logger = logging.getLogger("fedvitals")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _answer(work: Callable[[], str]) -> Answer:
    try:
        with _quiet():
            return Answer("ok", work())
    except FedvitalsError as error:
        return Answer(FAILED, str(error))
    except Exception:  # noqa: BLE001 - the study looks for exactly these
        return Answer(CRASHED, traceback.format_exc())


def _verb(store: Path, verb: str, *arguments: str) -> Answer:
    def work() -> str:
        words = [verb, *arguments, *(("--store", str(store)) if verb != "doctor" else (str(store),))]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(words)
        except SystemExit as end:
            if int(end.code or 0) > 1:
                raise FedvitalsError(err.getvalue()) from end
        return out.getvalue()

    return _answer(work)


def _file(store: Path, verb: str, name: str, *arguments: str) -> Answer:
    """Return the files that a verb wrote."""
    out = store.parent / name

    def work() -> str:
        answer = _verb(store, verb, *arguments, "--output" if verb == "report" else "--out", str(out))
        if answer.state == CRASHED:
            raise RuntimeError(answer.text)
        if answer.state == FAILED:
            raise FedvitalsError(answer.text)
        files = sorted(out.rglob("*")) if out.is_dir() else [out]
        return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())

    return _answer(work)


def store_answers(store: Path, run: str, *, brief: bool, report: bool) -> Iterator[tuple[str, Answer]]:
    """Yield each reader's answer for a store; only the fast ones if `brief`. A report takes seconds."""
    forget()
    yield "runs", _verb(store, "runs", "--json")
    yield "show", _verb(store, "show", run, "--json")
    yield "findings", _verb(store, "findings", run, "--json")
    yield "metrics", _verb(store, "query", "SELECT run, round, node, name, value, at FROM metrics", "--json")
    columns = "run, round, node, family, layer, count, mean, std, l2, min, max"
    yield "layers", _verb(store, "query", f"SELECT {columns} FROM layer_statistics", "--json")  # noqa: S608
    yield "others", _verb(
        store, "query", "SELECT (SELECT COUNT(*) FROM events), (SELECT SUM(bytes) FROM transfers), "
        "(SELECT TOTAL(seconds) FROM spans), (SELECT GROUP_CONCAT(message) FROM findings)", "--json",
    )  # fmt: skip
    if brief:
        return
    yield "export", _file(store, "export", "csv", run, "--to", "csv")
    if report:
        yield "report", _file(store, "report", "report.html", run)
    yield from _dashboard(store, run)


def _dashboard(store: Path, run: str) -> Iterator[tuple[str, Answer]]:
    app = create_app(store)
    client = TestClient(app, base_url=HOME, raise_server_exceptions=False)  # without the app's background work
    for path in ("runs", f"runs/{run}/overview", f"runs/{run}/clients", f"runs/{run}/findings"):
        with _quiet():
            reply = client.get(f"/api/{path}")
        state = "ok" if reply.status_code == 200 else CRASHED if reply.status_code == 500 else FAILED
        yield f"dashboard {path.rpartition('/')[2]}", Answer(state, reply.text)
    app.state.reader_cache.close()


def tape_answers(store: Path, run: str, rounds: int) -> Iterator[tuple[str, Answer]]:
    """Yield a tape reader's answers, round by round and state by state."""
    folder = Path(f"{store}.d") / "tape" / run
    yield "settings", _answer(lambda: repr(TapeReader(folder).setting))
    yield "replay", _verb(store, "replay", run, "-c", "goto 4", "--json")
    for round_index in range(rounds):
        yield f"round {round_index}", _answer(lambda r=round_index: repr(TapeReader(folder).entry(r)))  # type: ignore[misc]
        yield f"state {round_index}", _answer(lambda r=round_index: _state(folder, r))  # type: ignore[misc]


def _state(folder: Path, round_index: int) -> str:
    tensors = TapeReader(folder).state(round_index)
    return repr({name: digest_of(state) for name, state in tensors.items()})


def spill_answers(store: Path) -> Iterator[tuple[str, Answer]]:
    """Yield the records that wait beside a store, by their numbers."""
    yield "spill", _answer(lambda: json.dumps([repr(record) for record in drain_spill(Path(f"{store}.d"))]))


def ask_doctor(store: Path) -> tuple[Answer, bool]:
    """Return the doctor's answer, and whether it reports trouble."""
    forget()
    answer = _verb(store, "doctor", "--json")
    trouble = True
    if answer.state == "ok":
        with contextlib.suppress(ValueError):
            trouble = bool(json.loads(answer.text)["result"]["trouble"])
    return answer, trouble
