# SPDX-License-Identifier: Apache-2.0
"""Route of the report on a run, or on the comparison of several, as a file.

`fedvitals report` writes it in a separate process: drawing takes seconds of processor time and memory that the
dashboard would keep.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import failure
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.dashboard.routes.compare import MOST, Name
from fedvitals.store.read.queries import find_run, get_run

router = Router("report")
TYPES = {"html": "text/html; charset=utf-8", "pdf": "application/pdf"}
SECONDS = 300
_one_at_a_time = threading.Lock()


@router.get("/api/report")
def get_report(
    request: Request,
    runs: Annotated[list[Name], Meta(min_length=1, max_length=MOST)],
    kind: Annotated[Literal["html", "pdf"], Meta(extra={"name": "format"})] = "html",
) -> Response:
    """The report on a run, or on the comparison of several. PDF needs a Chromium on this machine."""
    cache = request.app.state.reader_cache
    with cache.reader() as reader:
        ids = list(dict.fromkeys(find_run(reader, run) for run in runs))
        name = file_name(get_run(reader, ids[0]).name, ids)
    if not _one_at_a_time.acquire(blocking=False):
        return failure(503, "Another report is being written.", "Ask again in a moment.")
    try:
        return _written(ids, kind, name, cache.target)
    finally:
        _one_at_a_time.release()


def file_name(name: str, ids: list[str]) -> str:
    """Return the name of a report's file, without its ending: plain letters of the run's name, else its id."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name or ids[0])
    return f"{plain.strip('-.')[:60] or 'run'}-{'comparison' if len(ids) > 1 else 'report'}"


def _written(ids: list[str], kind: str, name: str, target: str | Path) -> Response:
    with tempfile.TemporaryDirectory(prefix="fedvitals-report-") as folder:
        file = Path(folder) / f"report.{kind}"
        # -P: modules only come from the installation, never from the folder of a stranger's store.
        command = [sys.executable, "-P", "-m", "fedvitals", "report", "-o", str(file), "--", *ids]
        # Not an argument: an address may contain a password, and all users of a machine can see arguments.
        store = target if isinstance(target, str) else str(Path(target).resolve())
        environment = {**os.environ, "FEDVITALS_STORE": store}
        try:
            done = subprocess.run(  # noqa: S603 - ourselves
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return failure(503, f"The report was not written within {SECONDS} s.")
        if not file.exists():
            why = done.stderr.strip().splitlines()[-1:] or ["The report could not be written."]
            return failure(501, why[0].removeprefix("Error: ")[:500])
        headers = {"Content-Disposition": f'attachment; filename="{name}.{kind}"', "Cache-Control": "no-store"}
        return Response(file.read_bytes(), media_type=TYPES[kind], headers=headers)
