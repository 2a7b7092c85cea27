# SPDX-License-Identifier: Apache-2.0
"""A SuperLink of Flower's that simulates federations, one run after the other, as processes of our own.

Whatever happens, nothing of it is left: all processes, and those that they start (Ray's among them, which outlive their
parents), are known by a folder that stands in their environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from fedvitals.errors import FedvitalsError, MissingExtraError

HOME = "FLWR_HOME"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; 1 unless told
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",  # a client has one core
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
START_SECONDS = 90.0  # on a machine with much else to do
RUN_SECONDS = 300.0
END_SECONDS = 30.0
NAME = "here"  # of the SuperLink, for `flwr run`
TAIL = 4000  # characters of a log that an error quotes


class FlowerError(FedvitalsError):
    """A process of Flower's that did not start, did not end, or failed."""


class SuperLink:
    """`with` starts it and ends it, with everything that it has started.

    `environment`: what its processes find there besides our own, such as the variable that attaches fedvitals.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # Ray's sockets lie below it, and a socket's path may have 107 characters: hence not where a caller says.
        self._folder = Path(tempfile.mkdtemp(prefix="fv", dir="/tmp" if Path("/tmp").is_dir() else None))  # noqa: S108 - made by mkdtemp
        self._home, self._empty = self._folder / "home", self._folder / "empty"
        self._environment = {**os.environ, **QUIET, **(environment or {}), HOME: str(self._home)}
        self._environment["RAY_TMPDIR"] = str(self._folder)
        self._environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._log = self._folder / "superlink.log"
        self._runs = 0
        self._own: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _needs_flower()
        self._home.mkdir()
        self._empty.mkdir()  # a package in the working directory would win over the app's
        port = _free_port()
        told = f'[superlink]\ndefault = "{NAME}"\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (self._home / "config.toml").write_text(told, encoding="utf-8")
        command = ["flower-superlink", "--insecure", "--simulation", "--port", str(port)]
        try:
            with self._log.open("wb") as log:
                process = self._start([*command, "--disable-runtime-dependency-installation"], log)
            self._await(process, port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def simulate(
        self, app: Path, settings: Mapping[str, Any], *, nodes: int, seconds: float = RUN_SECONDS, cpus: int = 1
    ) -> str:
        """What the run logged, once it has ended; `settings` are the run's configuration. Its failing is no error."""
        self._runs += 1
        config = self._folder / f"run-{self._runs}.toml"
        config.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()), encoding="utf-8")
        federation = f"num-supernodes={nodes} client-resources-num-cpus={cpus}"
        command = ["flwr", "run", str(app), NAME, "--stream", "--run-config", str(config)]
        log = self._folder / f"run-{self._runs}.log"
        with log.open("wb") as file:
            process = self._start([*command, "--federation-config", federation], file)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise FlowerError(f"A run has not ended after {seconds:.0f} s:\n{_tail(log)}") from None
        if code != 0:
            raise FlowerError(f"`flwr run` ended with code {code}:\n{_tail(log)}\n{_tail(self._log)}")
        return log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End every process that was started here or by one of those, and remove what they wrote."""
        for _ in range(20):  # one may start another while they are ended
            if not (left := [*self._processes()]):
                break
            for process in left:
                with contextlib.suppress(Exception):  # gone meanwhile
                    process.kill()
            _await_end(left)
        for own in self._own:
            own.wait(END_SECONDS)  # it has ended, and is let go
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        program = Path(sys.executable).parent / command[0]
        process = subprocess.Popen(  # noqa: S603 - Flower's own programs
            [str(program), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self._empty,
            env=self._environment,
        )
        self._own.append(process)
        return process

    def _await(self, process: subprocess.Popen[bytes], port: int) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None:
                raise FlowerError(f"The SuperLink ended with code {process.returncode}:\n{_tail(self._log)}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.1)
        raise FlowerError(f"The SuperLink does not listen after {START_SECONDS:.0f} s:\n{_tail(self._log)}")

    def _processes(self) -> Iterator[Any]:
        """All that have our folder in their environment; those of other users cannot be asked."""
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(HOME) == str(self._home) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _await_end(processes: list[Any]) -> None:
    import psutil  # noqa: PLC0415 - an extra

    psutil.wait_procs(processes, END_SECONDS)


def _needs_flower() -> None:
    for package, extra in (("flwr", "flower"), ("psutil", "system")):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package, extra, "Running a federation of Flower's") from None
    if not (Path(sys.executable).parent / "flower-superlink").exists():
        raise FlowerError(f"There is no program flower-superlink beside {sys.executable}. Install flwr 1.26 or newer.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
