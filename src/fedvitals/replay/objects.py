# SPDX-License-Identifier: Apache-2.0
"""States on disk, each named by its content: what is there already is not written again.

A file is safetensors inside zstd. Before it is packed, the bytes of numbers are sorted by their place (all first bytes,
all second ones, ...), because signs and exponents resemble each other where mantissas are noise. Nothing is unpickled,
and what is read is what was written, or an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from fedvitals.errors import MissingExtraError, StoreError
from fedvitals.replay.digests import Tensors, digest_of

try:
    import safetensors.torch
    import zstandard
except ModuleNotFoundError as error:  # pragma: no cover - the extra
    raise MissingExtraError(error.name or "zstandard", "replay", "The replay tape") from error

LEVEL = 1  # of zstd: higher ones take three times as long for a hundredth
LARGEST = 64 << 30  # bytes of one state: what says that it is larger is no state of ours
NAME = re.compile(r"[0-9a-f]{32}")


class Objects:
    """The states in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        for file in folder.glob("??/*"):
            if NAME.fullmatch(file.name):
                self._sizes[file.name] = file.stat().st_size

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes or self._path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._sizes])

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def put(self, digest: str, tensors: Tensors) -> int:
        """How many bytes were written: none for what is there already. Whole or not at all."""
        if digest in self._sizes:
            return 0
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = pack(tensors)
        replace_file(path, packed)
        self._sizes[digest] = len(packed)
        return len(packed)

    def get(self, digest: str) -> dict[str, Tensor]:
        try:
            tensors = unpack(self._path(digest).read_bytes())
        except FileNotFoundError:
            raise StoreError(f"The state {digest} is not on the tape (any more).") from None
        except Exception as error:  # of three libraries, each with its own
            raise StoreError(f"The state {digest} on the tape cannot be read: {error}") from error
        if digest_of(tensors) != digest:
            raise StoreError(f"The state {digest} on the tape is damaged: its content has another digest.")
        return tensors

    def size(self, digest: str) -> int:
        return self._sizes.get(digest, 0)

    def remove(self, digest: str) -> int:
        """How many bytes that frees."""
        self._path(digest).unlink(missing_ok=True)
        return self._sizes.pop(digest, 0)

    def _path(self, digest: str) -> Path:
        if not NAME.fullmatch(digest):
            raise StoreError(f"'{digest}' is no name of a state: 32 hexadecimal digits.")
        return self.folder / digest[:2] / digest


def replace_file(path: Path, content: bytes) -> None:
    """Whole or not at all; also where two processes write the same."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)  # noqa: PTH105 - atomic
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def pack(tensors: Tensors) -> bytes:
    """One byte that says how wide the numbers are (0: of several kinds), then zstd of sorted safetensors."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    written = safetensors.torch.save(_apart(held), {"order": "\n".join(held)})
    widths = {tensor.element_size() for tensor in held.values()}
    width = widths.pop() if len(widths) == 1 else 0
    if width > 1:
        head = 8 + int.from_bytes(written[:8], "little")
        body = np.frombuffer(written, np.uint8, offset=head).reshape(-1, width)
        written = written[:head] + body.T.tobytes()
    return bytes([width]) + zstandard.ZstdCompressor(level=LEVEL).compress(written)


def unpack(packed: bytes) -> dict[str, Tensor]:
    if zstandard.frame_content_size(packed[1:]) > LARGEST:
        raise StoreError("it says that it is larger than any state.")
    written, width = zstandard.ZstdDecompressor().decompress(packed[1:]), packed[0]
    head = 8 + int.from_bytes(written[:8], "little")
    if width > 1:
        body = np.frombuffer(written, np.uint8, offset=head).reshape(width, -1)
        written = written[:head] + body.T.tobytes()
    found = safetensors.torch.load(written)
    order = order_in(written[8:head])
    return {name: found[name] for name in order} if sorted(order) == sorted(found) else found


def order_in(header: bytes) -> list[str]:
    """safetensors sorts tensors by its own rule; a state has them in the model's order."""
    noted = msgspec.json.decode(header).get("__metadata__", {}).get("order", "")
    return str(noted).split("\n") if noted else []


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory, as views of one flat vector do unless they are its own pieces."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
