# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server of the tests' own: made in a temporary folder, stopped at the end, never the machine's."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

MISSING = "no PostgreSQL server to start (Debian, Ubuntu: apt install postgresql; scripts/servers does it for root)"


def binaries() -> Path | None:
    """The folder with initdb and pg_ctl, of the newest version."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name.split(".")[0]))
    on_path = shutil.which("pg_ctl")
    folders += [Path(on_path).resolve().parent] if on_path else []
    found = [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]
    return found[-1] if found else None


def _driver() -> bool:
    with contextlib.suppress(ImportError):
        import psycopg  # noqa: F401

        return True
    return False


available = pytest.mark.skipif(binaries() is None or not _driver(), reason=MISSING if _driver() else "no psycopg")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server; `stop` and `start` again as often as wanted. A database for each who asks."""

    def __init__(self, folder: Path) -> None:
        self._bin = binaries()
        self._folder, self.port, self._numbers = folder, _free_port(), itertools.count()
        # initdb and postgres refuse root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "-D", folder / "data", "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            # A crash of the server loses nothing without fsync, only a crash of the machine does.
            settings.write(
                f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{folder}'\n"
                "fsync = off\nshared_buffers = 32MB\nmax_connections = 40\nautovacuum = off\n"
            )

    def _run(self, program: str, *arguments: object) -> None:
        with tempfile.TemporaryFile() as said:  # not a pipe, which the server would keep open
            done = subprocess.run(
                [self._bin / program, *map(str, arguments)], stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                user=self._user, cwd=self._folder, check=False, timeout=60,
            )  # fmt: skip
            said.seek(0)
            assert done.returncode == 0, said.read().decode(errors="replace")

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-D", self._folder / "data", "-l", self._folder / "log")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-D", self._folder / "data", "-m", mode)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def url(self, database: str = "postgres", user: str = "tester") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """The address of a new, empty database."""
        import psycopg

        name = f"d{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


@contextlib.contextmanager
def running():
    """A server that lives as long as the block."""
    if binaries() is None or not _driver():
        pytest.skip(MISSING)
    # Not below pytest's own folders, which only their owner may enter; and short, for the socket's sake.
    with tempfile.TemporaryDirectory(prefix="fv-pg-") as name:
        server = Server(Path(name))
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(AssertionError):
                server.stop()
