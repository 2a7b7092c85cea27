# SPDX-License-Identifier: Apache-2.0
"""The files of clients' tapes at one site: FOLDER/RUN/NODE/ROUND-PHASE, and the arrays once in FOLDER/RUN/objects.

Many processes write at once, each for a client of its own; only thinning needs the folder for itself, and is left to
another if somebody writes. What is read may be damaged, or from somebody who means ill: sizes, names and kinds are
checked, and nothing is unpickled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from fedvitals.errors import StoreError, unknown
from fedvitals.replay.tape.digests import StateDigest, Tensors, digest_of
from fedvitals.replay.tape.objects import NAME as OBJECT
from fedvitals.replay.tape.objects import StateFiles, pack, replace_file
from fedvitals.replay.tape.unpack_limits import read_json

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows: there thinning is not guarded
    fcntl = None  # type: ignore[assignment]

OBJECTS, LOCK = "objects", "lock"
LARGEST = 64 << 20  # bytes of one message's entry, without its arrays
LONGEST = 20_000  # characters of an error
ROOM = 0.9  # of the budget, to which a full tape is thinned
PART = re.compile(r"[A-Za-z0-9_.-]{1,120}")  # names of runs and nodes
FILE = re.compile(r"([0-9]{8,12})-([a-z]+(?:\.\w{1,80})?)")


class Heard(msgspec.Struct):
    """One message at a client: what came, in which surroundings, and what became of it."""

    run: str
    node: str
    round: int | None  # as the message said; None: it did not
    phase: str  # «train», «evaluate», «query», or one with an action: «train.personal»
    at: float
    metadata: dict[str, Any]
    content: dict[str, Any]  # outlines: see `tape_records`
    state: dict[str, Any]
    context: dict[str, Any]
    rng: dict[str, Any]
    threads: int
    machine: dict[str, str]
    app: str | None = None  # the folder of the app
    handler: str | None = None  # file:line
    sent: str | None = None  # digests of the arrays of content and state; None: there are none
    held: str | None = None
    reply: dict[str, Any] | None = None
    mark: StateDigest | None = None  # of the reply's arrays
    error: str | None = None
    seconds: float = 0.0
    version: int = 1


class Site:
    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder, self.budget = folder, budget

    # -- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, run: str) -> Iterator[None]:
        """Nobody thins meanwhile."""
        (self.folder / _part(run)).mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(shared=True):
            yield

    def put(self, run: str, tensors: Tensors) -> str | None:
        """The digest by which the arrays are found; written under a name that no other process has, until whole."""
        if not tensors:
            return None
        digest = digest_of(tensors)
        path = self.folder / _part(run) / OBJECTS / digest[:2] / digest
        if path.exists():
            return digest
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, pack(tensors))
        return digest

    def write(self, heard: Heard) -> None:
        folder = self.folder / _part(heard.run) / _part(heard.node)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if heard.round is None:  # nobody told: its own count
            heard.round = 1 + max((number for number, phase in _listed(folder) if phase == heard.phase), default=0)
        packed = zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(heard))
        replace_file(folder / f"{heard.round:08d}-{heard.phase}", packed)

    def thin(self) -> None:
        """Down to the budget, oldest messages first; not now, if somebody writes."""
        if self.budget is None or self.bytes() <= self.budget:
            return
        with suppress(BlockingIOError), self._locked(shared=False):
            entries = sorted((path for run in self._runs() for path in self._entries(run)), key=_age)
            while entries and self.bytes() > self.budget * ROOM:
                gone = entries[: max(1, len(entries) // 10)]
                entries = entries[len(gone) :]
                for path in gone:
                    path.unlink(missing_ok=True)
                for run in {path.parent.parent for path in gone}:
                    self._sweep(run)

    def _sweep(self, run: Path) -> None:
        used: set[str | None] = set()
        for path in self._entries(run):
            with suppress(StoreError):
                heard = _read(path)
                used |= {heard.sent, heard.held, None if heard.mark is None else heard.mark.digest}
        for path in (run / OBJECTS).glob("??/*"):
            if path.name not in used:
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, *, shared: bool) -> Iterator[None]:
        if fcntl is None:  # pragma: no cover
            yield
            return
        with (self.folder / LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield  # closing it sets it free

    # -- reading ------------------------------------------------------------------------------------------------------

    def bytes(self) -> int:
        found = 0
        for run in self._runs():
            for path in (*run.glob("*/*"), *(run / OBJECTS).glob("??/*")):
                with suppress(OSError):
                    found += path.stat().st_size if path.is_file() else 0
        return found

    def runs(self) -> list[str]:
        return sorted(run.name for run in self._runs())

    def nodes(self, run: str) -> list[str]:
        folder = self.folder / _part(run)
        return sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name != OBJECTS)

    def messages(self, run: str, node: str) -> list[tuple[int, str]]:
        """Round and phase of each, in their order."""
        return sorted(_listed(self.folder / _part(run) / _part(node)))

    def read(self, run: str, node: str, round_index: int, phase: str) -> Heard:
        known = self.messages(run, node)
        if (round_index, phase) not in known:
            have = ", ".join(f"{number} ({what})" for number, what in known[-20:]) or "none"
            raise StoreError(
                f"Of node {node} in {run} the tape has no {phase} message of round {round_index}. It has: {have}."
            )
        return _read(self.folder / _part(run) / _part(node) / f"{round_index:08d}-{phase}")

    def tensors(self, run: str, digest: str | None) -> Tensors:
        if digest is None:
            return {}
        if not OBJECT.fullmatch(digest):
            raise StoreError(f"'{digest[:60]}' is no name of a state: 32 hexadecimal digits.")
        return StateFiles(self.folder / _part(run) / OBJECTS).get(digest)

    def _runs(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if path.is_dir() and PART.fullmatch(path.name)]

    def _entries(self, run: Path) -> list[Path]:
        return [path for path in run.glob("*/*") if path.parent.name != OBJECTS and FILE.fullmatch(path.name)]


def find_run(site: Site, said: str | None) -> str:
    """By its name, by Flower's number of it, or as the only one that there is."""
    known = site.runs()
    for name in (said, f"flower-{said}"):
        if name in known:
            return str(name)
    if said is None and len(known) == 1:
        return known[0]
    if not known:
        raise StoreError(
            f"There is no client's tape in {site.folder}. Clients keep one with fv.flower.client_mod(tape=FOLDER), or "
            "where FEDVITALS_TAPE says a folder."
        )
    raise StoreError(unknown("run", str(said or "none"), known))


def find_node(site: Site, run: str, said: str) -> str:
    """By Flower's id, the end of it, or «partition 3»."""
    known = site.nodes(run)
    if said in known:
        return said
    partition = re.fullmatch(r"partition[ -]?([0-9]+)", said.strip().lower())
    found = [n for n in known if _partition(site, run, n) == int(partition[1])] if partition else []
    if partition is None and len(said) >= 3:  # fewer would mean anybody
        found = [name for name in known if name.endswith(said)]
    if len(found) == 1:
        return found[0]
    raise StoreError(unknown("node", said, known))


def _partition(site: Site, run: str, node: str) -> Any:
    known = site.messages(run, node)
    with suppress(StoreError):
        return site.read(run, node, *known[-1]).context.get("node_config", {}).get("partition-id") if known else None
    return None


def place_of(handler: Any) -> str | None:
    """Where a function stands, as file:line."""
    code = getattr(inspect.unwrap(handler), "__code__", None) if callable(handler) else None
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _read(path: Path) -> Heard:
    try:
        heard = read_json(path, Heard, LARGEST)
    except (OSError, ValueError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise StoreError(f"The message in {path} cannot be read: {error}") from error
    if heard.version != 1:
        raise StoreError(f"The message in {path} was written by another version of fedvitals ({heard.version}).")
    return heard


def _listed(folder: Path) -> list[tuple[int, str]]:
    matches = (FILE.fullmatch(path.name) for path in folder.glob("*"))
    return [(int(match[1]), match[2]) for match in matches if match is not None]


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _part(name: str) -> str:
    if not PART.fullmatch(name) or name in (".", "..", OBJECTS):
        raise StoreError(f"'{name[:120]}' is no name of a run or a node on a tape.")
    return name
