# SPDX-License-Identifier: Apache-2.0
"""A Flower deployment of the tests' own: SuperLink, SuperNodes and `flwr` as real processes on free ports of loopback.

However a test ends, nothing of it is left: all processes and what they start carry a mark in their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "FEDVITALS_TEST_FEDERATION"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # 1 s unless told: a tenth of a small round
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
START, SHORT = 90.0, 60.0  # seconds that a start and a command may take on a machine with much else to do

# Flower knows of a process that was killed when it has not been heard of for 60 s. Nothing but the number is changed.
SILENCE = 20
IMPATIENT = f"""import flwr.common.constant
flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = {SILENCE}
flwr.common.constant.HEARTBEAT_PATIENCE = 1
"""


NOT_REGISTERED = "/fleet/register-node"  # in what a SuperNode says when the SuperLink did not take it


@dataclass(frozen=True)
class Certificates:
    """Paths of what TLS needs: the authority that all trust, and the SuperLink's own certificate and key."""

    authority: Path
    certificate: Path
    key: Path


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer; a failure that says what was waited for, otherwise."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}, in vain"
        time.sleep(0.2)  # others need the processor
    return answer


class Process:
    """One program in a folder of its own, with its log in a file; it may be started again with the same words."""

    def __init__(self, folder: Path, command: list[object], environment: dict[str, str], config: str = "") -> None:
        self._command, self._log = [str(word) for word in command], folder / "log"
        self._cwd, home = folder / "empty", folder / "home"  # a package in the working directory would win over the app
        self._cwd.mkdir(parents=True)
        home.mkdir()
        (home / "config.toml").write_text(config)
        self._environment = {**environment, "FLWR_HOME": str(home)}
        self._retries = 3
        self.start()

    def start(self) -> None:
        # The programs come from the environment of this Python; Flower finds its own by name, too.
        place = Path(sys.executable).parent
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [place / self._command[0], *self._command[1:]], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                cwd=self._cwd, env={**self._environment, "PATH": f"{place}:{os.environ['PATH']}"},
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, pattern: str, seconds: float = START) -> str:
        """The first match of the pattern in the log (its first group), waited for."""

        def match_in_log() -> re.Match[str] | None:
            match = re.search(pattern, self.log())
            if not match and not self.alive and NOT_REGISTERED in self.log() and self._retries:
                self._retries -= (
                    1  # Flower's SuperLink answers 500 when several nodes register at once on a busy machine
                )
                self._log.write_text("")
                self.start()
            assert match or self.alive, f"{self._command} ended with {self._process.poll()}:\n{self.log()[-3000:]}"
            return match

        try:
            return until(match_in_log, seconds, repr(pattern)).group(1)
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}\n{self.log()[-3000:]}") from None

    def below(self, program: str) -> list[psutil.Process]:
        """Its children, and theirs, that run this program."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    found += [child] if any(Path(word).name == program for word in child.cmdline()[:2]) else []
        return found

    def wait(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._command} runs after {seconds:.0f} s:\n{self.log()[-3000:]}") from None

    def kill(self) -> None:
        """`kill -9`: of this process alone."""
        self._process.kill()
        self._process.wait(SHORT)


class SuperNode(Process):
    """A client's machine. `identity` is the node id that the SuperLink gave to it, as fedvitals writes it."""

    @property
    def identity(self) -> str:
        return self.says(r"SuperNode ID: (\d+)")

    def apps(self) -> list[psutil.Process]:
        """The ClientApp that runs now: one process for each message."""
        return self.below("flwr-clientapp")


class Run(Process):
    """`flwr run --stream`: ends with the run; its log is the server's."""

    @property
    def number(self) -> int:
        return int(self.says(r"[Ss]uccessfully started run (\d+)"))


class Federation:
    """A SuperLink and its SuperNodes; made by `deployed`."""

    def __init__(self, folder: Path, certificates: Certificates | None, more: dict[str, str]) -> None:
        self.folder, self._certificates, self._mark = folder, certificates, uuid.uuid4().hex
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(IMPATIENT)
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, **QUIET, "PYTHONPATH": path, **more, MARK: self._mark}
        self._port, self._processes = free_ports(1)[0], list[Process]()
        self.pace = 0.0  # seconds that SuperNodes took to start: how fast this machine is now, whatever else it does

    def start(self, *, authenticated: bool) -> None:
        # Without a file the SuperLink forgets its nodes and runs when it is restarted.
        command = ["flower-superlink", "--port", self._port, "--database", self.folder / "superlink.db"]
        command += ["--disable-runtime-dependency-installation", *self._security("--ssl-certfile", "--ssl-keyfile")]
        command += ["--enable-supernode-auth"] if authenticated else []
        self.superlink = self._started(Process, "superlink", command)
        self._await_superlink()

    def _security(self, *own: str) -> list[object]:
        if self._certificates is None:
            return ["--insecure"]
        if not own:
            return ["--root-certificates", self._certificates.authority]
        mine = ["--ssl-ca-certfile", self._certificates.authority]
        return [*mine, own[0], self._certificates.certificate, own[1], self._certificates.key]

    def _await_superlink(self) -> None:
        def listens() -> bool:
            assert self.superlink.alive, f"the SuperLink ended:\n{self.superlink.log()[-3000:]}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return True
            return False

        until(listens, START, "the SuperLink's port")

    def add_nodes(self, count: int, *more: list[object]) -> list[SuperNode]:
        """SuperNodes with partition ids 0, 1, …, online. `more`: further arguments for each of them."""
        began = time.monotonic()
        own = [
            ["--node-config", f"partition-id={i} num-partitions={count}", *(more[i] if more else ())]
            for i in range(count)
        ]
        nodes = [self.add_node(f"node-{i}", *words) for i, words in enumerate(own)]
        for node in nodes:
            assert node.identity  # waits for it: it is online then
        self.pace = time.monotonic() - began
        return nodes

    def add_node(self, name: str, *words: object) -> SuperNode:
        """One more, which may not be let in."""
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self._port}", "--port", free_ports(1)[0]]
        return self._started(SuperNode, name, [*command, *self._security(), *words])

    def flwr(self, *words: object) -> Process:
        """A command of Flower's CLI, in which this SuperLink is called `there`."""
        return self._cli(Process, words)

    def online(self) -> set[str]:
        """The ids of the SuperNodes that the SuperLink has heard of lately."""
        asked = self.flwr("supernode", "list", "there", "--format", "json")
        assert asked.wait(SHORT) == 0, asked.log()
        return {node["node-id"] for node in json.loads(asked.log())["nodes"] if node["status"] == "online"}

    def submit(self, app: Path, **config: object) -> Run:
        """`flwr run` of the app, followed to its end. Underscores in the names of the settings stand for dashes."""
        settings = self.folder / f"settings-{len(self._processes)}.toml"
        settings.write_text("".join(f"{name.replace('_', '-')} = {_toml(value)}\n" for name, value in config.items()))
        return self._cli(Run, ["run", app, "there", "--stream", "--run-config", settings])

    def _cli(self, kind: type, words: Sequence[object]) -> Any:
        secure = f'root-certificates = "{self._certificates.authority}"' if self._certificates else "insecure = true"
        config = f'[superlink]\ndefault = "there"\n[superlink.there]\naddress = "127.0.0.1:{self._port}"\n{secure}\n'
        return self._started(kind, f"flwr-{len(self._processes)}", ["flwr", *words], config)

    def _started(self, kind: type, name: str, command: list[object], config: str = "") -> Any:
        process = kind(self.folder / name, command, self._environment, config)
        self._processes.append(process)
        return process

    def restart_superlink(self) -> None:
        """`kill -9` and a new SuperLink on the same port with the same database."""
        below = psutil.Process(self.superlink._process.pid).children(recursive=True)
        self.superlink.kill()
        # SuperExec and ServerApp see that their parent is gone, and end by themselves.
        until(lambda: not any(map(_runs, below)), SHORT, f"the end of {below}")
        self.superlink.start()
        self._await_superlink()

    def marked(self) -> list[psutil.Process]:
        """Every process that was started by this federation, or by one of its processes, and runs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                found += [process] if process.environ().get(MARK) == self._mark else []
        return found

    def end(self) -> None:
        for _ in range(20):  # one may start another while they are ended
            left = self.marked()
            ours = [process.alive for process in self._processes]  # and with that they are no zombies any more
            if not left and not any(ours):
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 5)
        raise AssertionError(f"still running: {self.marked()}")


def _runs(process: psutil.Process) -> bool:
    """Not what is dead and was not asked for its last words: Flower does not always ask."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def free_ports(count: int) -> list[int]:
    """All of them held at once, so that they differ."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def deployed(
    folder: Path, *, certificates: Certificates | None = None, authenticated: bool = False, **more: str
) -> Iterator[Federation]:
    """A SuperLink that lives as long as the block, with all that was started in it. `more`: environment variables."""
    federation = Federation(folder, certificates, more)
    try:
        federation.start(authenticated=authenticated)
        yield federation
    finally:
        federation.end()
