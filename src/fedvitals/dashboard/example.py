# SPDX-License-Identifier: Apache-2.0
"""Unpacks the example store that ships with the dashboard; `scripts/example` creates it."""

from __future__ import annotations

import lzma
from pathlib import Path

PACKED = Path(__file__).with_name("example.db.xz")


def unpack(folder: Path) -> Path:
    """Unpack the example as a store in that folder, and return its path."""
    target = folder / "example.db"
    target.write_bytes(lzma.decompress(PACKED.read_bytes()))
    return target
