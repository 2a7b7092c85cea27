# SPDX-License-Identifier: Apache-2.0
"""Our own PostgreSQL server in a temporary folder: started, stopped, killed, or out of disk space."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def binaries() -> Path | None:
    """Return the folder with initdb and pg_ctl, of the newest version."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name.split(".")[0]))
    on_path = shutil.which("pg_ctl")
    folders += [Path(on_path).resolve().parent] if on_path else []
    found = [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]
    return found[-1] if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerError(RuntimeError):
    """A PostgreSQL program failed."""


class PostgresServer:
    """One server; `start`, `stop` and `kill` may be called any number of times. `database` creates new ones."""

    def __init__(self, folder: Path) -> None:
        found = binaries()
        if found is None:
            raise ServerError("There is no PostgreSQL here: apt install postgresql, or scripts/servers.")
        self._bin = found
        self._folder, self.port, self._numbers = folder, _free_port(), itertools.count()
        # initdb and postgres refuse root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "-D", folder / "data", "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            # Without fsync, only a crash of the machine loses data, not a crash of the server.
            settings.write(
                f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{folder}'\n"
                "fsync = off\nshared_buffers = 32MB\nmax_connections = 40\nautovacuum = off\n"
            )

    def _run(self, program: str, *arguments: object) -> None:
        with tempfile.TemporaryFile() as said:  # not a pipe, which the server would keep open
            done = subprocess.run(  # noqa: S603 - PostgreSQL's own programs
                [self._bin / program, *map(str, arguments)],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                user=self._user,
                cwd=self._folder,
                check=False,
                timeout=60,
            )
            said.seek(0)
            if done.returncode:
                raise ServerError(f"{program} failed: {said.read().decode(errors='replace')}{self.log()[-2000:]}")

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-D", self._folder / "data", "-l", self._folder / "log")

    def kill(self) -> None:
        """Kill -9 all of its processes, so that nothing more is written."""
        while own := self._processes():
            for process in own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        locks = (self._folder / "data" / "postmaster.pid", self._folder / f".s.PGSQL.{self.port}.lock")
        for lock in locks:  # a new server would check whether that process lives, and it may be a zombie
            lock.unlink(missing_ok=True)

    def _processes(self) -> list[int]:
        """Return its processes, which all have its data folder as working directory."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "cwd").readlink() == self._folder / "data":
                    found.append(int(folder.name))
        return found

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-D", self._folder / "data", "-m", mode)

    def log(self) -> str:
        log = self._folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def url(self, database: str = "postgres", user: str = "tester") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """Return the address of a new, empty database."""
        import psycopg  # noqa: PLC0415 - an extra

        name = f"d{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Yield a server that lives as long as the block."""
    # Short, because of the socket, and accessible to its own user.
    with tempfile.TemporaryDirectory(prefix="fv-pg-") as name:
        server = PostgresServer(Path(name))
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(ServerError):
                server.stop()
