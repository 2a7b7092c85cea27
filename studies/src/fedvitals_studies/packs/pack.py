# SPDX-License-Identifier: Apache-2.0
"""A folder that runs a trial on a machine with torch, Triton and numpy, and nothing else, not even a network.

A GPU is lent for minutes, without software, and the size of transfers is limited: so the folder contains the package's
source and the one required wheel, unpacked, and the data cut into parts that can be transferred one by one.

    FOLDER/code/run.py      puts the data together again, then calls the trial; needs no installation
    FOLDER/code/fedvitals   and msgspec beside it, for the Python over there
    FOLDER/data0, data1 …   each at most `part_bytes` in all
    FOLDER/joined           made by run.py: the data files as they were, where the lab looks for them (FEDVITALS_DATA)
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fedvitals
import fedvitals_studies
from fedvitals.errors import ConfigError
from fedvitals_studies.packs.commit import commit

PART_BYTES = 24 << 20  # of the 64 MiB that one call transfers, including a repository of some 30 MB
PLATFORM = "manylinux2014_x86_64"
WHEELS = ("msgspec", "tomli_w")  # all that a trial imports besides the standard library, torch, Triton and numpy


@dataclass(frozen=True, slots=True)
class Packed:
    code: Path
    parts: tuple[Path, ...]  # folders of data, each one transfer

    @property
    def script(self) -> Path:
        return self.code / "run.py"


def pack(
    folder: Path,
    *,
    data: Sequence[Path],
    entry: str,
    python: str = "3.12",
    part_bytes: int = PART_BYTES,
    wheels: Sequence[Path] = (),
) -> Packed:
    """Write the folder, replacing an earlier pack.

    `entry` names what run.py calls with its arguments, as «module:function»: a function from list[str] to an exit code.
    `wheels`: files to unpack, at least msgspec's, if pip cannot download it for that version of Python.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: a pack is a folder. Name another, or one that is not there yet.")
    if any(folder.glob("*")) and not (folder / "code" / "manifest.json").exists():
        raise ConfigError(f"{folder} is not empty, and no pack. Name another folder, or an empty one.")
    with tempfile.TemporaryDirectory() as downloads:
        unpacked = Path(downloads) / "unpacked"  # before anything is changed: this may fail
        for wheel in wheels or _download(Path(downloads), python):
            _unpack(wheel, unpacked)
        return _write(folder, unpacked, data=data, entry=entry, python=python, part_bytes=part_bytes)


def _write(folder: Path, unpacked: Path, *, data: Sequence[Path], entry: str, python: str, part_bytes: int) -> Packed:
    for old in [folder / "code", *folder.glob("data[0-9]*")]:
        shutil.rmtree(old, ignore_errors=True)
    code = folder / "code"
    for package in (fedvitals, fedvitals_studies):
        folder_of_package = Path(package.__file__ or "").parent
        shutil.copytree(folder_of_package, code / package.__name__, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(unpacked, code, dirs_exist_ok=True)
    parts, files = _cut(folder, data, part_bytes)
    manifest = {"entry": entry, "commit": commit(), "python": python, "files": files}
    (code / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("runner.py"), code / "run.py")
    return Packed(code, parts)


LEFT_OUT = ("__pycache__", "static", "*.xz", "flower", "dashboard")
"""What no trial on a GPU imports, and is large."""


def size(folder: Path) -> int:
    """Return the total bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{wheel} cannot be read as a wheel: {why}. On a machine with a network, `pip download {' '.join(WHEELS)} "
            f"--no-deps --only-binary=:all: --python-version 3.12 --platform {PLATFORM}` fetches the one to name."
        ) from None


def _download(folder: Path, python: str) -> list[Path]:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        "--python-version", python, "--platform", PLATFORM, *WHEELS,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"pip could not download {', '.join(WHEELS)} for Python {python} ({why}). Where there is no network, name "
            "its wheel: --wheel FILE; another version of Python over there: --python."
        )
    return sorted(folder.glob("*.whl"))


def _cut(folder: Path, data: Sequence[Path], part_bytes: int) -> tuple[tuple[Path, ...], list[dict[str, object]]]:
    """Cut the files, in sequence, into pieces in folders of at most `part_bytes`, about equal."""
    total = sum(path.stat().st_size for path in data)
    part_bytes = -(-total // max(1, -(-total // part_bytes)))
    parts: list[Path] = []
    room = 0
    files: list[dict[str, object]] = []
    for path in data:
        content, first = path.read_bytes(), 0
        pieces: list[str] = []
        while first < len(content):
            if not room:
                parts.append(folder / f"data{len(parts)}")
                parts[-1].mkdir(parents=True)
                room = part_bytes
            piece = content[first : first + room]
            name = f"{path.name}.{len(pieces)}"
            (parts[-1] / name).write_bytes(piece)
            pieces.append(f"{parts[-1].name}/{name}")
            first, room = first + len(piece), room - len(piece)
        files.append({"name": path.name, "pieces": pieces, "sha256": hashlib.sha256(content).hexdigest()})
    return tuple(parts), files
