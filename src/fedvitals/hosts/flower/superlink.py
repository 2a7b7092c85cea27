# SPDX-License-Identifier: Apache-2.0
"""Run a SuperLink of our own that simulates on this machine, on a free port, and ends with everything it started.

Flower would start one itself, detached, and keep using it: our environment variables would take effect too late, or
persist. The app's processes are its children, in sessions of their own, and some (Ray's) outlive their parents: they
are recognised by an inherited variable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedvitals.errors import ConfigError, FedvitalsError, MissingExtraError

MARK = "FEDVITALS_SUPERLINK"
QUIET = {  # no outgoing connections
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; 1 by default
}
START, STOP = 90.0, 10.0  # seconds, allowing for a busy machine
TAIL = 4000  # characters of its log quoted in an error


def program(name: str) -> str:
    """Return the path of one of Flower's programs, for the Python running this."""
    beside = Path(sysconfig.get_path("scripts")) / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ConfigError(f"Flower's program '{name}' is not beside this Python ({sys.executable}), nor on the PATH.")
    return path


def with_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Flower finds its own programs, which it calls by name."""
    path = os.pathsep.join((str(Path(program("flwr")).parent), environment.get("PATH", "")))
    return {**environment, "PATH": path}


@contextlib.contextmanager
def superlink(environment: Mapping[str, str], *, cwd: Path | None = None, options: Sequence[str] = ()) -> Iterator[int]:
    """Run a SuperLink inside the block and yield the port it listens on."""
    try:
        import psutil  # type: ignore[import-untyped]  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise MissingExtraError("psutil", "flower", "Starting Flower's SuperLink") from None
    port, mark = free_port(), uuid.uuid4().hex
    command = [program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 - the program of the installed flwr
            [*command, "--host", "127.0.0.1", "--port", str(port), *options],
            env={**QUIET, **with_programs(environment), MARK: mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # we handle Ctrl-C
        )
        try:
            _wait_until_listening(process, port, log)
            yield port
        finally:
            with signal_handled(signal.SIGINT, signal.SIG_IGN):  # a second Ctrl-C would leave processes behind
                _end_processes(process, mark)


def _wait_until_listening(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    ends = time.monotonic() + START
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > ends:
            log.seek(0)
            log_end = log.read().decode(errors="replace").strip()[-TAIL:]
            raise FedvitalsError(f"Flower's SuperLink did not start. The end of its log:\n{log_end}")
        time.sleep(0.1)


def _end_processes(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask all processes to end, then kill those that did not. Any of them may start another meanwhile."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        ends = time.monotonic() + STOP
        asked: set[int] = set()
        while (left := _marked_processes(mark)) and time.monotonic() < ends:
            for child in left:
                if child.pid not in asked:
                    asked.add(child.pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child.pid, how)
            process.poll()  # otherwise it stays as a zombie
            time.sleep(0.05)
    process.wait(STOP)


def _marked_processes(mark: str) -> list[Any]:
    """Return the processes that have our mark in their environment; those of other users cannot be read."""
    import psutil  # noqa: PLC0415 - an extra

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


@contextlib.contextmanager
def signal_handled(signal_number: signal.Signals, handler: Any) -> Iterator[None]:
    """Handle a signal with `handler` inside the block; in threads that may not set handlers, nothing changes."""
    try:
        before = signal.signal(signal_number, handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal_number, before)


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turn termination signals into SystemExit inside the block, so that what was started is ended first."""

    def leave(signal_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal_number)

    if not hasattr(signal, "SIGHUP"):  # Windows
        raise FedvitalsError(
            "Starting a SuperLink of Flower needs Linux or macOS. On this system attach fedvitals in the app, by one "
            "line on each side (docs/flower.md), or send the app to a SuperLink on another machine."
        )
    with signal_handled(signal.SIGTERM, leave), signal_handled(signal.SIGHUP, leave):
        yield


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
