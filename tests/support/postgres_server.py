# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server of the tests' own: made in a temporary folder, stopped at the end, never the machine's."""

from __future__ import annotations

import contextlib

import pytest

from fedvitals_studies.postgres_server import binaries, running_server

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
    with running_server() as server:
        yield server
