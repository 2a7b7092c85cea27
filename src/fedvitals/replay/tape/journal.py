# SPDX-License-Identifier: Apache-2.0
"""One small file per round: which clients were asked, what they replied, with which weight, and all digests.

JSON inside zstd, written whole or not at all: a run that is killed has every round that it finished.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from fedvitals.errors import ConfigError, StoreError
from fedvitals.replay.tape.digests import StateDigest
from fedvitals.replay.tape.objects import replace_file
from fedvitals.replay.tape.unpack_limits import decode_json, read_json, regular_file

LARGEST_SETTING = 64 << 20  # bytes of tape.json
CHECKSUM_SINCE = 2  # version of the settings
_NO_CHECKSUM = "00000000"
E = TypeVar("E", bound=msgspec.Struct)


class ClientReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's reply as it arrived at its parent."""

    node: str
    mark: StateDigest | None = None  # None where nothing came
    weight: float = 0.0  # as reported: its number of samples
    used: bool = True
    group: str | None = None
    start: str = "model"  # which tensor state of the round it was trained from
    losses: bytes = b""  # float32, of each local step
    error: str | None = None
    notes: dict[str, Any] = msgspec.field(name="said", default_factory=dict)  # by the host: metrics and the like


class RoundEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One round: the state before it, the replies, and the state after it."""

    round: int
    state: dict[str, StateDigest]  # before: the model, and what the server and the topology remember
    notes: dict[str, Any] = {}  # the part of the state that is no tensor, as the host wrote it; actions in force
    came: tuple[ClientReply, ...] = ()
    after: dict[str, StateDigest] = {}
    after_notes: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}
    lost: int = 0  # answers that the tape had no room for

    @property
    def actions(self) -> Sequence[Mapping[str, Any]]:
        """Return the corrections that were in force, by their recorded fields."""
        actions: Sequence[Mapping[str, Any]] = self.notes.get("actions", ())
        return actions

    @property
    def goes_back(self) -> bool:
        """Return whether a correction restored an earlier model before this round."""
        return any("restore" in action.get("arguments", {}) for action in self.actions)

    def reply_of(self, node: str) -> ClientReply | None:
        """Return a client's reply; None if it took no part."""
        return next((reply for reply in self.came if reply.node == node), None)

    def required_reply(self, node: str) -> ClientReply:
        """Return a client's reply. Raises ConfigError if it took no part."""
        reply = self.reply_of(node)
        if reply is None:
            asked = ", ".join(came.node for came in self.came) or "nobody"
            raise ConfigError(f"{node} took no part in round {self.round}. These did: {asked}.")
        return reply

    def measured_metrics(self) -> dict[str, float]:
        """Return the metrics, with NaN for those that were not finite."""
        return {name: math.nan if value is None else value for name, value in self.metrics.items()}


class TapeSettings(msgspec.Struct, omit_defaults=True):
    """Description of the run: everything besides the states that running it again needs."""

    version: int = 1
    run: str = ""
    name: str = ""
    host: str = ""
    layers: tuple[str, ...] = ()  # of the model, in the order of its digests
    description: dict[str, Any] = msgspec.field(
        name="told", default_factory=dict
    )  # by the host: experiment, engine, ...
    machine: dict[str, str] = {}  # on which bits may depend: torch, CPU type, device
    kept: dict[str, Any] = {}  # the tape's own settings
    checksum: str = ""  # CRC-32 of the file with zeros in place of this; since version 2


class RoundJournal:
    """The round entries in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rounds = folder / "rounds"

    def write(self, entry: RoundEntry) -> int:
        """Write a round's entry and return its size in bytes."""
        self._rounds.mkdir(parents=True, exist_ok=True)
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(msgspec.json.encode(entry))
        replace_file(self._rounds / f"{entry.round:08d}", packed)
        return len(packed)

    def read(self, round_index: int) -> RoundEntry:
        """Return a round's entry. Raises StoreError if it cannot be read, or is that of another round."""
        entry = self.read_as(RoundEntry, round_index)
        if entry.round != round_index:
            raise StoreError(
                f"Round {round_index} on the tape cannot be read: its file has the entry of round {entry.round}. "
                f"The others can be without it: remove {self._rounds / f'{round_index:08d}'}."
            )
        return entry

    def read_as(self, kind: type[E], round_index: int) -> E:
        """Return a round's entry as a struct with fewer fields, for readers of many rounds."""
        path = self._rounds / f"{round_index:08d}"
        try:
            return read_json(path, kind)
        except FileNotFoundError:
            raise StoreError(
                f"Round {round_index} is not on the tape. It has: {round_ranges(self.rounds())}."
            ) from None
        except (OSError, ValueError, zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"Round {round_index} on the tape cannot be read: {error}. The others can be without it: remove {path}."
            ) from error

    def written(self, round_index: int) -> int | None:
        """Return when a round was written, in nanoseconds; None if it is not there."""
        with contextlib.suppress(OSError):
            return (self._rounds / f"{round_index:08d}").stat().st_mtime_ns
        return None

    def rounds(self) -> list[int]:
        """Return the rounds that are recorded, ascending."""
        return sorted(int(file.name) for file in self._rounds.glob("[0-9]*") if file.name.isdecimal())

    def entries(self) -> Iterator[RoundEntry]:
        """Yield the entries of all rounds."""
        for round_index in self.rounds():
            yield self.read(round_index)

    def forget_from(self, round_index: int) -> None:
        """Remove this and all later rounds, because a run that continues from an earlier round writes them again."""
        for later in self.rounds():
            if later >= round_index:
                (self._rounds / f"{later:08d}").unlink(missing_ok=True)

    def bytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(file.stat().st_size for file in self._rounds.glob("*"))

    def set(self, setting: TapeSettings) -> None:
        """Write the tape's settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        setting.version, setting.checksum = CHECKSUM_SINCE, _NO_CHECKSUM
        content = msgspec.json.format(msgspec.json.encode(setting))
        replace_file(self.folder / "tape.json", content.replace(_field(_NO_CHECKSUM), _field(_checksum(content))))

    def setting(self) -> TapeSettings:
        """Return the tape's settings."""
        try:
            with regular_file(self.folder / "tape.json") as file:
                content = file.read(LARGEST_SETTING)  # of a longer one, the rest is missed by the decoder
            return _verified(content)
        except FileNotFoundError:
            raise StoreError(f"There is no tape in {self.folder}.") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self.folder / 'tape.json'} cannot be read: {error}") from error


def _verified(content: bytes) -> TapeSettings:
    """Decode the settings. Raises ValueError if their checksum is not theirs; old tapes have none."""
    setting = decode_json(content, TapeSettings, 0)
    if setting.version >= CHECKSUM_SINCE or setting.checksum:
        blank = content.replace(_field(setting.checksum), _field(_NO_CHECKSUM))
        if setting.checksum != _checksum(blank):
            raise ValueError("it is damaged: its checksum is not that of its content")
    return setting


def _field(checksum: str) -> bytes:
    return f'"checksum": "{checksum}"'.encode()


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def round_ranges(rounds: list[int]) -> str:
    """Return rounds as ranges in words: «0–4, 9»."""
    parts: list[list[int]] = []
    for round_index in rounds:
        if parts and round_index == parts[-1][-1] + 1:
            parts[-1].append(round_index)
        else:
            parts.append([round_index])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts) or "none"
