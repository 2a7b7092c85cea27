# SPDX-License-Identifier: Apache-2.0
"""Read the compressed files of a tape within stated limits.

A tape may come from somebody else, and 60 kB of zstd can stand for gigabytes. Nothing is unpacked beyond a limit that
follows from what the file (or the whole tape) takes on disk, and JSON is only decoded when it holds a plausible number
of values, because an empty list costs three bytes in a file and sixty in memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from fedvitals.errors import MissingExtraError

try:
    import zstandard
except ModuleNotFoundError as error:  # pragma: no cover - the extra
    raise MissingExtraError("zstandard", "replay", "The replay tape") from error

LARGEST_STATE = "FEDVITALS_LARGEST_STATE"  # environment variable that raises the limits on states, such as "8 GB"
SMALL_STATE = 256 << 20  # bytes that any single state may unpack to
SMALL_ROUND = 1 << 30  # bytes that all states of one round may unpack to together
STATE_RATIO = 16  # unpacked bytes for each byte that the tape's states take on disk
JSON_BYTES, LARGEST_JSON, JSON_RATIO = 64 << 20, 256 << 20, 64  # of one entry: always allowed, never exceeded, ratio
JSON_VALUES = 500_000  # values in one entry that are always allowed; more need as many bytes in the file
HEADER_BYTES = 16 << 20  # of a safetensors header: about 100,000 tensors
NOTE_BYTES = 1 << 16  # of the notes that lie beside rounds and states
PIECE = 1 << 20  # bytes that are unpacked in one go
WINDOW = 1 << 27  # bytes of memory that a zstd frame may ask for to look back

T = TypeVar("T")


@contextmanager
def regular_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading. Raises ValueError for a device, a pipe or a folder, which could block or never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        yield file


def read_note(path: Path) -> bytes:
    """The content of a small file of a tape; of a longer one its beginning, which its decoder refuses."""
    with regular_file(path) as file:
        return file.read(NOTE_BYTES)


def bytes_on_disk(status: os.stat_result) -> int:
    """The bytes that a file really takes: a file with holes in it may claim any size."""
    blocks = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else min(status.st_size, 512 * int(blocks))


def decompressed(file: IO[bytes]) -> Any:
    """A stream of the file's unpacked bytes, from where the file stands."""
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(file)


def read_json(path: Path, kind: type[T], largest: int = LARGEST_JSON) -> T:
    """Decode a file of JSON inside zstd. Raises ValueError (or an error of msgspec or zstd) if it cannot be trusted."""
    with regular_file(path) as file:
        packed = bytes_on_disk(os.fstat(file.fileno()))
        limit = min(largest, max(JSON_BYTES, JSON_RATIO * packed))
        content = bytearray()
        unpacked = decompressed(file)
        while piece := unpacked.read(PIECE):
            content += piece
            if len(content) > limit:
                raise ValueError(f"it unpacks to more than {limit} bytes, which no entry of ours does")
    return decode_json(bytes(content), kind, packed)


def decode_json(content: bytes, kind: type[T], packed: int) -> T:
    """Decode JSON whose number of values is plausible for a file of `packed` bytes."""
    values = sum(content.count(sign) for sign in (b",", b"[", b"{"))
    allowed = max(JSON_VALUES, packed)
    if values > allowed:
        raise ValueError(f"it holds about {values} values, where at most {allowed} are plausible")
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def state_limit(disk_bytes: int, *, together: bool = False) -> int:
    """The bytes that a state (or those of a round together) may unpack to, on a tape with `disk_bytes` of states."""
    return max(SMALL_ROUND if together else SMALL_STATE, STATE_RATIO * disk_bytes, _allowed_by_user())


def too_large(size: int, limit: int) -> str:
    """The end of a sentence about a state (or several) that would unpack to more than is allowed."""
    return (
        f"it would unpack to {size:,} bytes, where at most {limit:,} are plausible on this tape. If you trust it, set "
        f"the environment variable {LARGEST_STATE} to a size such as '8 GB'"
    )


def _allowed_by_user() -> int:
    text = os.environ.get(LARGEST_STATE)
    if not text:
        return 0
    from fedvitals.replay.tape.tape import byte_count  # noqa: PLC0415 - that module imports this one

    return byte_count(text, f"limit {LARGEST_STATE}")
