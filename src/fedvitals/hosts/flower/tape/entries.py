# SPDX-License-Identifier: Apache-2.0
"""The files of clients' tapes at one site: FOLDER/RUN/NODE/ROUND-PHASE, and the arrays once in FOLDER/RUN/objects.

Many processes write at once, each for its own client; only thinning needs exclusive access to the folder, and is
skipped if another process writes. What is read may be damaged or malicious: sizes, names and kinds are checked, and
nothing is unpickled.
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
THINNED_SHARE = 0.9  # of the budget, to which a full tape is thinned
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,120}")  # names of runs and nodes
# The metadata kept of a message, and their types.
METADATA = {
    **dict.fromkeys(("run_id", "src_node_id", "dst_node_id"), int),
    **dict.fromkeys(("message_id", "reply_to_message_id", "group_id", "message_type"), str),
    **dict.fromkeys(("created_at", "ttl"), float),
}
FILE_PATTERN = re.compile(r"([0-9]{8,12})-([a-z]+(?:\.\w{1,80})?)")


class ReceivedMessage(msgspec.Struct):
    """One message at a client: its content, its context, and the outcome."""

    run: str
    node: str
    round: int | None  # as the message said; None if it did not
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
    sent: str | None = None  # digests of the arrays of content and state; None if there are none
    held: str | None = None
    reply: dict[str, Any] | None = None
    mark: StateDigest | None = None  # of the reply's arrays
    error: str | None = None
    seconds: float = 0.0
    version: int = 1


class ClientTapeFolder:
    """The folder of clients' tapes. `budget`: bytes to which `thin` reduces it."""

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder, self.budget = folder, budget

    # -- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, run: str) -> Iterator[None]:
        """Prevent thinning inside the block."""
        (self.folder / _checked_name(run)).mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(shared=True):
            yield

    def put(self, run: str, tensors: Tensors) -> str | None:
        """Store arrays atomically, and return the digest by which they are found; None if there are none."""
        if not tensors:
            return None
        digest = digest_of(tensors)
        path = self.folder / _checked_name(run) / OBJECTS / digest[:2] / digest
        if path.exists():
            return digest
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, pack(tensors))
        return digest

    def write(self, received: ReceivedMessage) -> None:
        """Write a message's entry."""
        folder = self.folder / _checked_name(received.run) / _checked_name(received.node)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if received.round is None:  # unknown: use the client's own count
            received.round = 1 + max(
                (round_index for round_index, phase in _messages_in(folder) if phase == received.phase), default=0
            )
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(msgspec.json.encode(received))
        replace_file(folder / f"{received.round:08d}-{received.phase}", packed)

    def thin(self) -> None:
        """Reduce the folder to the budget, oldest messages first; skipped if another process writes."""
        if self.budget is None or self.bytes() <= self.budget:
            return
        with suppress(BlockingIOError), self._locked(shared=False):
            entries = sorted((path for run in self._runs() for path in self._entries(run)), key=_age)
            while entries and self.bytes() > self.budget * THINNED_SHARE:
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
                received = _read(path)
                used |= {received.sent, received.held, None if received.mark is None else received.mark.digest}
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
            yield  # closing it releases the lock

    # -- reading ------------------------------------------------------------------------------------------------------

    def bytes(self) -> int:
        """Return the bytes of the whole folder."""
        total = 0
        for run in self._runs():
            for path in (*run.glob("*/*"), *(run / OBJECTS).glob("??/*")):
                with suppress(OSError):
                    total += path.stat().st_size if path.is_file() else 0
        return total

    def runs(self) -> list[str]:
        """Return the names of the runs."""
        return sorted(run.name for run in self._runs())

    def nodes(self, run: str) -> list[str]:
        """Return the names of a run's nodes."""
        folder = self.folder / _checked_name(run)
        return sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name != OBJECTS)

    def messages(self, run: str, node: str) -> list[tuple[int, str]]:
        """Return round and phase of each message, in order."""
        return sorted(_messages_in(self.folder / _checked_name(run) / _checked_name(node)))

    def read(self, run: str, node: str, round_index: int, phase: str) -> ReceivedMessage:
        """Return a message. Raises StoreError if it is not there, or cannot be read."""
        known = self.messages(run, node)
        if (round_index, phase) not in known:
            have = ", ".join(f"{known_round} ({what})" for known_round, what in known[-20:]) or "none"
            raise StoreError(
                f"Of node {node} in {run} the tape has no {phase} message of round {round_index}. It has: {have}."
            )
        return _read(self.folder / _checked_name(run) / _checked_name(node) / f"{round_index:08d}-{phase}")

    def tensors(self, run: str, digest: str | None) -> Tensors:
        """Return the arrays of a digest; empty for None."""
        if digest is None:
            return {}
        if not OBJECT.fullmatch(digest):
            raise StoreError(f"'{digest[:60]}' is no name of a state: 32 hexadecimal digits.")
        return StateFiles(self.folder / _checked_name(run) / OBJECTS).get(digest)

    def _runs(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if path.is_dir() and NAME_PATTERN.fullmatch(path.name)]

    def _entries(self, run: Path) -> list[Path]:
        return [path for path in run.glob("*/*") if path.parent.name != OBJECTS and FILE_PATTERN.fullmatch(path.name)]


def find_run(folder: ClientTapeFolder, name: str | None) -> str:
    """Return the run of this name or Flower number; for None, the only one."""
    known = folder.runs()
    for candidate in (name, f"flower-{name}"):
        if candidate in known:
            return str(candidate)
    if name is None and len(known) == 1:
        return known[0]
    if not known:
        raise StoreError(
            f"There is no client's tape in {folder.folder}. Clients keep one with fv.flower.client_mod(tape=FOLDER), "
            "or where FEDVITALS_TAPE says a folder."
        )
    raise StoreError(unknown("run", str(name or "none"), known))


def find_node(folder: ClientTapeFolder, run: str, name: str) -> str:
    """Return the node of this id, of an id's ending, or «partition 3»."""
    known = folder.nodes(run)
    if name in known:
        return name
    partition = re.fullmatch(r"partition[ -]?([0-9]+)", name.strip().lower())
    matches = [n for n in known if _partition(folder, run, n) == int(partition[1])] if partition else []
    if partition is None and len(name) >= 3:  # fewer would be ambiguous
        matches = [known_name for known_name in known if known_name.endswith(name)]
    if len(matches) == 1:
        return matches[0]
    raise StoreError(unknown("node", name, known))


def _partition(folder: ClientTapeFolder, run: str, node: str) -> Any:
    known = folder.messages(run, node)
    with suppress(StoreError):
        return folder.read(run, node, *known[-1]).context.get("node_config", {}).get("partition-id") if known else None
    return None


def source_location(handler: Any) -> str | None:
    """Return where a function is defined, as file:line; None if unknown."""
    code = getattr(inspect.unwrap(handler), "__code__", None) if callable(handler) else None
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _read(path: Path) -> ReceivedMessage:
    try:
        received = read_json(path, ReceivedMessage, LARGEST)
    except (OSError, ValueError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise StoreError(f"The message in {path} cannot be read: {error}") from error
    if received.version != 1:
        raise StoreError(f"The message in {path} was written by another version of fedvitals ({received.version}).")
    return received


def _messages_in(folder: Path) -> list[tuple[int, str]]:
    matches = (FILE_PATTERN.fullmatch(path.name) for path in folder.glob("*"))
    return [(int(match[1]), match[2]) for match in matches if match is not None]


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _checked_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name) or name in (".", "..", OBJECTS):
        raise StoreError(f"'{name[:120]}' is no name of a run or a node on a tape.")
    return name
