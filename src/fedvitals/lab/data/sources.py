# SPDX-License-Identifier: Apache-2.0
"""Where data sets are searched for and downloaded from, and the error when one is missing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, kind_of, require

Progress = Callable[[str, int, int | None], None]
"""Told again and again: the file, the bytes that have come, and how many there will be, where that is known."""

VARIABLE = "FEDVITALS_DATA"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a data set, as its authors publish it."""

    url: str
    file: str  # below the folder of data
    checksum: str  # "md5:…" or "sha256:…"


class PublishedDataset(Description, frozen=True):
    """Base class of data sets that their authors publish as files: the whole, or a fixed subset of so many samples."""

    samples: int | None = None
    test_samples: int | None = None
    sources: ClassVar[tuple[Source, ...]]

    def __post_init__(self) -> None:
        kind = kind_of(type(self).__name__)
        for name, value in (("samples", self.samples), ("test_samples", self.test_samples)):
            require(value is None or value >= 1, f"{name} of {kind}", value, "at least 1")


def user_cache() -> Path:
    """Return the user's cache folder, XDG_CACHE_HOME/fedvitals; it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvitals"


def download_folder() -> Path:
    """Return the default folder for downloads, which is also searched."""
    return Path(os.environ.get(VARIABLE) or user_cache() / "data")


def search_folders(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders to search. A folder that the user names is the only one."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"The folder of data '{folder}' does not exist. Name one that does, or leave it out.")
        return [Path(folder)]
    named = os.environ.get(VARIABLE)
    from_environment = [Path(named)] if named else []
    return [*from_environment, Path.cwd().parent / "shared" / "data", user_cache() / "data"]


def missing_dataset_error(name: str, page: str, files: str, looked: Sequence[Path]) -> ConfigError:
    """Return the error for a missing data set: where it was searched for, where to get it, where to put it."""
    return ConfigError(
        f"The data set {name} was not found in {', '.join(map(str, looked))}. Get it from {page}, or let "
        f"`fedvitals lab` fetch it with --download, and put {files} into one of these folders, or into one that you "
        f"name with --data or {VARIABLE}."
    )


def fetch(source: Source, folder: Path, progress: Progress | None = None) -> Path:
    """Return the path of a source's file, downloading it if needed; its checksum is verified in either case."""
    target = folder / source.file
    if target.exists():
        if _checksum(target, source.checksum) == source.checksum:
            return target
        raise ConfigError(f"{target} is not the published file: its checksum differs. Delete it, and download it anew.")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _transfer(source, part, progress)
        got = _checksum(part, source.checksum)
        if got != source.checksum:
            raise ConfigError(
                f"{source.url} gave a file with the checksum {got}, expected was {source.checksum}. It was not kept: "
                "try again, or get the file by other means."
            )
        part.replace(target)
    except OSError as error:  # urllib's errors are OSErrors too
        raise ConfigError(
            f"{source.url} could not be downloaded to {target}: {error}. Check the network and the folder, or put the "
            "file there yourself."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return target


def _transfer(source: Source, part: Path, progress: Progress | None) -> None:
    with urllib.request.urlopen(source.url, timeout=60) as answer, part.open("wb") as file:  # noqa: S310 - from our tables
        length = answer.headers.get("Content-Length")
        total, done = int(length) if length else None, 0
        while block := answer.read(1 << 20):
            file.write(block)
            done += len(block)
            if progress is not None:
                progress(source.file, done, total)
        if total is not None and done < total:
            raise urllib.error.ContentTooShortError(f"only {done} of {total} bytes came", (source.file, answer.headers))


def _checksum(path: Path, wanted: str) -> str:
    kind = wanted.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"  # against damage; the sites are trusted
