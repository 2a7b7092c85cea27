# SPDX-License-Identifier: Apache-2.0
"""Size limits for unpacking data set files: an archive of a few kilobytes may expand to gigabytes.

The limits are several times the size of the official files.
"""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import IO

from fedvitals.errors import ConfigError

FILE_BYTES = 256 << 20  # of one unpacked file: the largest, the images of Fashion-MNIST, have 47 MB
ARCHIVE_BYTES = 2 << 30  # of all arrays in one .npz
MEMBER_BYTES = 16 << 20  # of one image or table in a zip


def read_gzip(path: Path) -> bytes:
    """Return the unpacked content of a .gz file."""
    with gzip.open(path) as file:
        return read_bounded(file, str(path))


def read_bounded(file: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    """Return all bytes of a stream, or raise ConfigError if they exceed the limit for one file."""
    content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise ConfigError(f"{name} unpacks to more than {FILE_BYTES:,} bytes: it is no file of this data set.")
    return content


def check_npz_size(path: Path) -> None:
    """Raise ConfigError if the arrays of an .npz would unpack to more than any data set here needs."""
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > ARCHIVE_BYTES:
        raise ConfigError(f"{path} would unpack to {total:,} bytes: it is no file of this data set.")


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return one file of a zip within the limit. zipfile itself never unpacks more than the archive declares."""
    size = archive.getinfo(name).file_size
    if size > MEMBER_BYTES:
        raise ConfigError(f"{archive.filename}: {name} would unpack to {size:,} bytes: it is no file of this data set.")
    return archive.read(name)
