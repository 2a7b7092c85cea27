# SPDX-License-Identifier: Apache-2.0
"""Unpacks files from another machine; damaged files, and files that would fill the memory, are refused."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from fedvitals.errors import ConfigError

MOST = 1 << 29  # size of one unpacked file: twenty times the largest that we have made


def unpacked(path: Path, what: str) -> bytes:
    """Return the content of a gzip file; `what`: its purpose, for the message."""
    try:
        with gzip.open(path) as file:
            content = file.read(MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as {what}: {error}. Fetch it again.") from None
    if len(content) > MOST:
        raise ConfigError(f"{path} cannot be read as {what}: unpacked, it has more than {MOST} bytes.")
    return content
