# SPDX-License-Identifier: Apache-2.0
"""States on disk, each named by its content, so that a state that is there already is not written again.

A file is safetensors inside zstd. Before compression the bytes of numbers are sorted by their place (all first bytes,
all second ones, ...), because signs and exponents resemble each other where mantissas are noise. Nothing is unpickled,
and what is read is what was written, or an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from fedvitals.errors import ConfigError, MissingExtraError, StoreError
from fedvitals.replay.tape import unpack_limits
from fedvitals.replay.tape.digests import Tensors, digest_of

try:
    import safetensors.torch
    import zstandard
except ModuleNotFoundError as error:  # pragma: no cover - the extra
    raise MissingExtraError(error.name or "zstandard", "replay", "The replay tape") from error

ZSTD_LEVEL = 1  # of zstd: higher ones take three times as long for a hundredth
NAME = re.compile(r"[0-9a-f]{32}")


class StateFiles:
    """The stored states in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._disk_bytes = 0  # without the holes that a file may have
        for file in folder.glob("??/*"):
            with contextlib.suppress(OSError):  # a link that leads nowhere
                status = file.stat()
                if NAME.fullmatch(file.name) and stat.S_ISREG(status.st_mode):
                    self._sizes[file.name] = status.st_size
                    # Links cost nothing, and could lead to any large file, or to the same one many times.
                    own = file.parent.name == file.name[:2] and not file.is_symlink() and not file.parent.is_symlink()
                    self._disk_bytes += unpack_limits.bytes_on_disk(status) if own else 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes or self._path(digest).is_file()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._sizes])

    @property
    def bytes(self) -> int:
        """Return the bytes of all states."""
        return sum(self._sizes.values())

    def put(self, digest: str, tensors: Tensors) -> int:
        """Store a state, whole or not at all, and return how many bytes were written: 0 if it is there already."""
        if digest in self._sizes:
            return 0
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = pack(tensors)
        replace_file(path, packed)
        self._sizes[digest] = len(packed)
        self._disk_bytes += len(packed)
        return len(packed)

    def get(self, digest: str) -> dict[str, Tensor]:
        """Return a state. Raises StoreError if it is missing, damaged or implausibly large."""
        path = self._path(digest)
        try:
            with unpack_limits.regular_file(path) as file:
                own = unpack_limits.bytes_on_disk(os.fstat(file.fileno()))  # may be newer than this list
                tensors = unpack(file, unpack_limits.state_limit(max(self._disk_bytes, own)))
        except FileNotFoundError:
            raise StoreError(f"The state {digest} is not on the tape (any more).") from None
        except ConfigError:  # of the user's own limit
            raise
        except Exception as error:  # of three libraries, each with its own
            raise StoreError(f"The state {digest} on the tape cannot be read: {error}. Its file is {path}.") from error
        if digest_of(tensors) != digest:
            raise StoreError(
                f"The state {digest} on the tape is damaged: its content has another digest. Its file is {path}."
            )
        return tensors

    def limit_together(self) -> int:
        """Return the bytes that the states of one round may unpack to together."""
        return unpack_limits.state_limit(self._disk_bytes, together=True)

    def size(self, digest: str) -> int:
        """Return a state's bytes on disk; 0 if it is not there."""
        return self._sizes.get(digest, 0)

    def remove(self, digest: str) -> int:
        """Remove a state and return how many bytes that frees."""
        self._path(digest).unlink(missing_ok=True)
        return self._sizes.pop(digest, 0)

    def _path(self, digest: str) -> Path:
        if not NAME.fullmatch(digest):
            raise StoreError(f"'{digest}' is no name of a state: 32 hexadecimal digits.")
        return self.folder / digest[:2] / digest


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also while another process writes the same."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)  # noqa: PTH105 - atomic
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def pack(tensors: Tensors) -> bytes:
    """Return one byte for the width of the numbers (0: mixed), then zstd of the sorted safetensors."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Copies, because safetensors refuses tensors that share memory, as views of one flat vector do.
    copies = {name: tensor.clone() for name, tensor in held.items()}
    written = safetensors.torch.save(copies, {"order": "\n".join(held)})
    widths = {tensor.element_size() for tensor in held.values()}
    width = widths.pop() if len(widths) == 1 else 0
    if width > 1:
        head = 8 + int.from_bytes(written[:8], "little")
        body = np.frombuffer(written, np.uint8, offset=head).reshape(-1, width)
        written = written[:head] + body.T.tobytes()
    return bytes([width]) + zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(written)


def unpack(file: IO[bytes], limit: int) -> dict[str, Tensor]:
    """Return the tensors of a packed file. Raises StoreError before more than `limit` bytes are unpacked.

    The header is read first: it says how many bytes follow, and a file that does not match is refused.
    """
    width = file.read(1)
    unpacked = unpack_limits.decompressed(file)
    length = unpacked.read(8)
    size = int.from_bytes(length, "little")
    if not width or len(length) < 8 or size > unpack_limits.HEADER_BYTES:
        raise StoreError(f"its header is missing, or has more than {unpack_limits.HEADER_BYTES} bytes")
    header = unpacked.read(size)
    body_bytes, order = _header_contents(header)
    if 8 + size + body_bytes > limit:
        raise StoreError(unpack_limits.too_large(8 + size + body_bytes, limit))
    body = unpacked.read(body_bytes)
    if len(body) != body_bytes or unpacked.read(1):
        raise StoreError("it does not hold as many bytes as its header says")
    if width[0] > 1:
        body = np.frombuffer(body, np.uint8).reshape(width[0], -1).T.tobytes()
    tensors = safetensors.torch.load(b"".join((length, header, body)))
    return {name: tensors[name] for name in order} if sorted(order) == sorted(tensors) else tensors


def _header_contents(header: bytes) -> tuple[int, list[str]]:
    """Return what a safetensors header says: how many bytes follow it, and the names in the model's order.

    safetensors sorts tensors by its own rule; a state has them in the model's order.
    """
    entries = unpack_limits.decode_json(header, dict[str, Any], 0)
    noted = str(entries.pop("__metadata__", {}).get("order", ""))
    ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    if any(end < 0 for end in ends):
        raise StoreError("its header names a negative place")
    return max(ends, default=0), noted.split("\n") if noted else []
