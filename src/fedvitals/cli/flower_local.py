# SPDX-License-Identifier: Apache-2.0
"""A SuperLink of our own for one `flwr run` on this machine: the app's processes are its children, and inherit from it.

Flower would start one itself, detached, and use it for ever after: an environment of ours would come too late, or
stay too long. Ours is on a free port, and ends with all that it started when the run does.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedvitals.errors import FedvitalsError

PORT = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"  # where `flwr` looks for a local SuperLink, before it starts one
LOCAL = (":local:", ":local-in-memory:")
START, END = 60.0, 15.0  # seconds that we wait for it
VALUED = ("--federation", "--run-config", "-c", "--federation-config", "--format")  # options of `flwr run` with a value


def remote_address(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The address of the SuperLink that `flwr run` with these arguments goes to; None if that is a local one."""
    home = Path(environment.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        connections = tomllib.loads((home / "config.toml").read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, ValueError):  # none yet, or one that flwr itself will complain of
        return None
    plain = _positional(arguments)
    named = plain[1] if len(plain) > 1 else connections.get("default")
    chosen = connections.get(named, {})
    address = chosen.get("address") if isinstance(chosen, dict) else None
    return None if address in (None, *LOCAL) else str(address)


def _positional(arguments: Sequence[str]) -> list[str]:
    found, words = [], iter(arguments)
    for word in words:
        if word in VALUED:
            next(words, None)
        elif not word.startswith("-"):
            found.append(word)
    return found


def knows_local() -> bool:
    """Whether this Flower has local SuperLinks that we can stand in for; older ones run apps as children of `flwr`."""
    from flwr.cli import constant

    return hasattr(constant, "LOCAL_SUPERLINK_HTTP_API_PORT")


def someone_listens(environment: Mapping[str, str]) -> bool:
    """Whether a local SuperLink of Flower's own runs already."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection(("127.0.0.1", int(environment.get(PORT) or 39091)), 0.5),
    ):
        return True
    return False


@contextlib.contextmanager
def superlink(program: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment with which `flwr` finds the SuperLink that lives as long as the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As `flwr` itself starts one, but for the file in which that remembers runs. Relative paths of the app hold.
    command = [str(program), "--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    quiet = {**environment, "FLWR_DISABLE_UPDATE_CHECK": "1"}  # `flwr` checks
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 - the program of the installed flwr
            [*command, "--port", str(port)],
            env=quiet,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to deal with
        )
        try:
            if not _healthy(process, port):
                log.seek(0)
                said = log.read().decode(errors="replace").strip()[-2000:]
                raise FedvitalsError(f"Flower's SuperLink did not start. It said:\n{said}")
            yield {**environment, PORT: str(port)}
        finally:
            end(process)


def _healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + START
    while process.poll() is None and time.monotonic() < until:
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(asked):
            asked.request("GET", "/health")
            if asked.getresponse().status == http.HTTPStatus.OK:
                return True
        time.sleep(0.1)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and all below it; a simulation that is cut short would not end by itself.

    SuperLink, SuperExec and the simulation are asked to, and tidy up: Ray is the simulation's to end. Then all must.
    """
    levels = _levels(process.pid)
    everyone = [pid for level in levels for pid in level]
    for ask, whom in ((signal.SIGTERM, [pid for level in levels[:3] for pid in level]), (signal.SIGKILL, everyone)):
        for pid in whom:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, ask)
        until = time.monotonic() + END
        while time.monotonic() < until:
            if all(_state(pid) in ("", "Z") for pid in everyone):
                process.wait(END)  # else it stays as a zombie
                return
            time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END)


def _levels(pid: int) -> list[list[int]]:
    """The process, its children, theirs, and so on, of what runs now."""
    children: dict[int, list[int]] = {}
    for child, (parent, _) in _processes().items():
        children.setdefault(parent, []).append(child)
    levels = [[pid]]
    while levels[-1]:
        levels.append([child for parent in levels[-1] for child in children.get(parent, ())])
    return levels


def _state(pid: int) -> str:
    return _processes(pid).get(pid, (0, ""))[1]


def _processes(*wanted: int) -> dict[int, tuple[int, str]]:
    """The parent and the state (Z: zombie) of processes, of all of them unless told which."""
    if not Path("/proc/self/stat").exists():
        which = ["-p", ",".join(map(str, wanted))] if wanted else ["-A"]
        listed = subprocess.run(["ps", *which, "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=False)  # noqa: S603, S607
        return {int(pid): (int(parent), state[0]) for pid, parent, state in map(str.split, listed.stdout.splitlines())}
    found = {}
    for place in [Path(f"/proc/{pid}/stat") for pid in wanted] or Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent, *_ = place.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            found[int(place.parent.name)] = int(parent), state
    return found
