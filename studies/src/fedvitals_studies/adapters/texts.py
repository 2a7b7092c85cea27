# SPDX-License-Identifier: Apache-2.0
"""Texts as bytes: clients are packages of Python's standard library, and the model has learnt Python's manual."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = (
    "asyncio", "email", "json", "http", "logging", "unittest", "xml", "multiprocessing", "importlib", "tkinter",
)  # fmt: skip
MANUAL = "pydoc_data"
OTHER_CODE = ("idlelib", "distutils", "lib2to3")  # that the model has seen, and no client has
CLIENT_BYTES, MANUAL_BYTES, HELD_BACK_BYTES = 120_000, 400_000, 12_000
WINDOW = 32  # bytes that the model sees at once


@functools.cache
def text_of(package: str, size: int = CLIENT_BYTES) -> Tensor:
    """Return the first bytes of a package's files, [size]."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"))
    content = b""
    for file in files:
        content += file.read_bytes()
        if len(content) >= size:
            break
    return torch.frombuffer(bytearray(content[:size]), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return stretches of a text, [count, WINDOW], and the bytes that follow each of theirs."""
    places = torch.randint(0, len(text) - WINDOW - 1, (count, 1), generator=generator) + torch.arange(WINDOW + 1)
    chosen = text[places]
    return chosen[:, :-1], chosen[:, 1:]
