# SPDX-License-Identifier: Apache-2.0
"""Texts as bytes: clients are packages of Python's standard library, and the model has learnt Python's manual.

Foreign texts are Debian's manual pages in other languages (`apt-get install manpages-de manpages-fr manpages-ja ...`).
"""

from __future__ import annotations

import functools
import gzip
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from fedvitals.errors import ConfigError

PACKAGES = (
    "asyncio", "email", "json", "http", "logging", "unittest", "xml", "multiprocessing", "importlib", "tkinter",
)  # fmt: skip
MANUAL = "pydoc_data"
OTHER_CODE = ("idlelib", "distutils", "lib2to3")  # that the model has seen, and no client has
CLIENT_BYTES, MANUAL_BYTES, HELD_BACK_BYTES = 120_000, 400_000, 12_000
WINDOW = 32  # bytes that the model sees at once
PADDING, IGNORED = 0, -100  # the byte behind a text that is shorter than its batch, and its target
MANUAL_PAGES = Path("/usr/share/man")
LANGUAGES = ("de", "fr", "es", "pl", "ru", "ja", "zh_CN")


@functools.cache
def text_of(package: str, size: int = CLIENT_BYTES) -> Tensor:
    """Return the first bytes of a package's files, [size]."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"))
    return _first_bytes((file.read_bytes() for file in files), size)


@functools.cache
def manual_pages(language: str, size: int = CLIENT_BYTES) -> Tensor:
    """Return the first bytes of the manual pages in a language, as Debian writes them, [size]."""
    pages = _first_bytes(
        (gzip.decompress(f.read_bytes()) for f in sorted((MANUAL_PAGES / language).rglob("*.gz"))), size
    )
    if len(pages) < size:
        raise ConfigError(f"Too few manual pages in '{language}': apt-get install manpages-{language[:2]}.")
    return pages


def _first_bytes(contents: Iterable[bytes], size: int) -> Tensor:
    joined = b""
    for content in contents:
        joined += content
        if len(joined) >= size:
            break
    return torch.frombuffer(bytearray(joined[:size]), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return stretches of a text, [count, WINDOW], and the bytes that follow each of theirs."""
    places = torch.randint(0, len(text) - WINDOW - 1, (count, 1), generator=generator) + torch.arange(WINDOW + 1)
    chosen = text[places]
    return chosen[:, :-1], chosen[:, 1:]


def shortened(x: Tensor, y: Tensor, length: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return stretches that end early, after `length` bytes on average (half to one and a half of it), padded."""
    lengths = length * (0.5 + torch.rand(len(x), 1, generator=generator))
    behind = torch.arange(x.shape[1]) >= lengths.round().clamp(1, x.shape[1])
    return x.masked_fill(behind, PADDING), y.masked_fill(behind, IGNORED)
