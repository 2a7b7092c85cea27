# SPDX-License-Identifier: Apache-2.0
"""Simulations of federations on our own SuperLink, one run after the other; nothing of them remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fedvitals.errors import FedvitalsError, MissingExtraError
from fedvitals.hosts.flower.superlink import QUIET, program, superlink, with_programs

OWN = {
    "OMP_NUM_THREADS": "1",  # a client has one core
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
RUN_SECONDS = 300.0
NAME = "here"  # of the SuperLink, for `flwr run`
TAIL = 4000  # characters of a log quoted in an error


class FlowerError(FedvitalsError):
    """A Flower process that did not start, did not end, or failed."""


class SuperLink:
    """Starts and ends a SuperLink in a `with` block, with everything that it has started.

    `environment`: additional variables for its processes, such as the one that attaches fedvitals.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # Ray's sockets are below it, and a socket's path may have 107 characters: hence not at a path of the caller.
        self._folder = Path(tempfile.mkdtemp(prefix="fv", dir="/tmp" if Path("/tmp").is_dir() else None))  # noqa: S108 - made by mkdtemp
        self._home, self._empty = self._folder / "home", self._folder / "empty"
        own = {**OWN, **(environment or {}), "FLWR_HOME": str(self._home), "RAY_TMPDIR": str(self._folder)}
        self._environment = {**os.environ, **QUIET, **own}
        self._runs = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
            needs_flower()
            self._home.mkdir()
            self._empty.mkdir()  # a package in the working directory would take precedence over the app's
            self._environment = with_programs(self._environment)
            options = ["--disable-runtime-dependency-installation"]
            port = opened.enter_context(superlink(self._environment, cwd=self._empty, options=options))
            address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
            told = f'[superlink]\ndefault = "{NAME}"\n[superlink.{NAME}]\n{address}'
            (self._home / "config.toml").write_text(told, encoding="utf-8")
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def simulate(
        self, app: Path, settings: Mapping[str, Any], *, nodes: int, seconds: float = RUN_SECONDS, cpus: int = 1
    ) -> str:
        """Return what the run logged, once it has ended; `settings` are the run's configuration. A failed run is no
        error.
        """
        self._runs += 1
        config = self._folder / f"run-{self._runs}.toml"
        config.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()), encoding="utf-8")
        federation = f"num-supernodes={nodes} client-resources-num-cpus={cpus}"
        command = ["run", str(app), NAME, "--stream", "--run-config", str(config)]
        log = self._folder / f"run-{self._runs}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - Flower's own programs
                [program("flwr"), *command, "--federation-config", federation],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self._empty,
                env=self._environment,
            )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise FlowerError(f"A run has not ended after {seconds:.0f} s:\n{_tail(log)}") from None
        finally:
            process.kill()
            process.wait()
        if code != 0:
            raise FlowerError(f"`flwr run` ended with code {code}:\n{_tail(log)}")
        return log.read_text(encoding="utf-8", errors="replace")


def needs_flower() -> None:
    try:
        import flwr  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise MissingExtraError("flwr", "flower", "Running a federation of Flower's") from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
