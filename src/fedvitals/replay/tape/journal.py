# SPDX-License-Identifier: Apache-2.0
"""What happened in each round, as a small file of its own: who was asked, what came, by which weight, and all digests.

JSON inside zstd, written whole or not at all: a run that is killed has every round that it finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from fedvitals.errors import StoreError
from fedvitals.replay.tape.digests import Mark
from fedvitals.replay.tape.objects import replace_file
from fedvitals.replay.tape.unpack_limits import decode_json, read_json, regular_file

LARGEST_SETTING = 64 << 20  # bytes of tape.json
E = TypeVar("E", bound=msgspec.Struct)


class Came(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's answer, as it arrived at its parent."""

    node: str
    mark: Mark | None = None  # None where nothing came
    weight: float = 0.0  # as it was told: its number of samples
    used: bool = True
    group: str | None = None
    start: str = "model"  # which tensor state of the round it was trained from
    losses: bytes = b""  # float32, of each local step
    error: str | None = None
    said: dict[str, Any] = {}  # of the host: metrics and the like


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One round: the state before it, what came in, the state after it."""

    round: int
    state: dict[str, Mark]  # before: the model, and what the server and the topology remember
    notes: dict[str, Any] = {}  # the part of the state that is no tensor, as the host wrote it; actions in force
    came: tuple[Came, ...] = ()
    after: dict[str, Mark] = {}
    after_notes: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}
    lost: int = 0  # answers that the tape had no room for

    def of(self, node: str) -> Came | None:
        return next((one for one in self.came if one.node == node), None)


class Setting(msgspec.Struct, omit_defaults=True):
    """What the run was: all that re-executing it needs besides the states."""

    version: int = 1
    run: str = ""
    name: str = ""
    host: str = ""
    layers: tuple[str, ...] = ()  # of the model, in the order of its digests
    told: dict[str, Any] = {}  # of the host: experiment, engine, data
    machine: dict[str, str] = {}  # on which bits may depend: torch, CPU type, device
    kept: dict[str, Any] = {}  # the tape's own settings


class Journal:
    """The entries in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rounds = folder / "rounds"

    def write(self, entry: Entry) -> int:
        self._rounds.mkdir(parents=True, exist_ok=True)
        packed = zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(entry))
        replace_file(self._rounds / f"{entry.round:08d}", packed)
        return len(packed)

    def read(self, number: int) -> Entry:
        return self.read_as(Entry, number)

    def read_as(self, kind: type[E], number: int) -> E:
        """A round as a struct of fewer fields: who looks at many rounds need not read everything of each."""
        path = self._rounds / f"{number:08d}"
        try:
            return read_json(path, kind)
        except FileNotFoundError:
            raise StoreError(f"Round {number} is not on the tape. It has: {spans(self.rounds())}.") from None
        except (OSError, ValueError, zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"Round {number} on the tape cannot be read: {error}. The others can be without it: remove {path}."
            ) from error

    def written(self, number: int) -> int | None:
        """When, in nanoseconds: another number for another content."""
        with contextlib.suppress(OSError):
            return (self._rounds / f"{number:08d}").stat().st_mtime_ns
        return None

    def rounds(self) -> list[int]:
        return sorted(int(file.name) for file in self._rounds.glob("[0-9]*") if file.name.isdecimal())

    def entries(self) -> Iterator[Entry]:
        for number in self.rounds():
            yield self.read(number)

    def forget_from(self, number: int) -> None:
        """A run that goes on from an earlier round writes the later ones anew."""
        for later in self.rounds():
            if later >= number:
                (self._rounds / f"{later:08d}").unlink(missing_ok=True)

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self._rounds.glob("*"))

    def set(self, setting: Setting) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "tape.json", msgspec.json.format(msgspec.json.encode(setting)))

    def setting(self) -> Setting:
        try:
            with regular_file(self.folder / "tape.json") as file:
                content = file.read(LARGEST_SETTING)  # of a longer one, the rest is missed by the decoder
            return decode_json(content, Setting, 0)
        except FileNotFoundError:
            raise StoreError(f"There is no tape in {self.folder}.") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self.folder / 'tape.json'} cannot be read: {error}") from error


def spans(rounds: list[int]) -> str:
    """«0–4, 9»."""
    parts: list[list[int]] = []
    for number in rounds:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts) or "none"
