# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server of the tests' own: made in a temporary folder, stopped at the end, never the machine's."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest

from fedvitals_studies.postgres_server import PostgresServer, ServerError, binaries

MISSING = "no PostgreSQL server to start (Debian, Ubuntu: apt install postgresql; scripts/servers does it for root)"


def _driver() -> bool:
    with contextlib.suppress(ImportError):
        import psycopg  # noqa: F401

        return True
    return False


available = pytest.mark.skipif(binaries() is None or not _driver(), reason=MISSING if _driver() else "no psycopg")


@contextlib.contextmanager
def running():
    """A server that lives as long as the block."""
    if binaries() is None or not _driver():
        pytest.skip(MISSING)
    # Not below pytest's own folders, which only their owner may enter; and short, for the socket's sake.
    with tempfile.TemporaryDirectory(prefix="fv-pg-") as name:
        server = PostgresServer(Path(name))
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(ServerError):
                server.stop()
