# SPDX-License-Identifier: Apache-2.0
"""Results of cases from another machine, as a few files to transfer, and how they are imported here.

A bundle contains, for each finished case, the facts about it and its outcomes; not the recording, which is ten times as
large: after a change of detectors, train again. For a matrix, as many recordings as fit are included, the most
interesting ones first. Bundles of several calls add up, and each lists the calls before.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from fedvitals.errors import ConfigError
from fedvitals_studies.faultbank.cases import Bank, Case
from fedvitals_studies.faultbank.examine import file_of as outcome_of
from fedvitals_studies.faultbank.examine import read_all
from fedvitals_studies.faultbank.pool import file_of as run_of
from fedvitals_studies.faultbank.pool import is_there
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.score import judge
from fedvitals_studies.packs.unpacked import unpacked

LARGEST = 14 << 20  # size of one file: 16 MiB may be transferred, and gzip's buffer is not counted
MOST = 8  # files
MOST_BYTES = 60 << 20  # total of all of them
PREFIX, SUFFIX = "bank-", ".tar.gz"
LEVEL = 6  # of gzip: a higher one takes long, and saves little
FACTS = "facts.json"
RUNS, OUTCOMES = "runs", "outcomes"
WHAT = "a bundle of cases"


class Facts(msgspec.Struct):
    """In the first file: the bank, its calls, and the cases that failed."""

    bank: str
    calls: list[dict[str, Any]]
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class Merged:
    """The information in the bundles besides the cases themselves."""

    cases: int
    failed: Mapping[str, str] = field(default_factory=dict)  # case → what went wrong
    calls: Sequence[Mapping[str, Any]] = ()  # each one's machine, versions and duration


def write(
    bank: Bank, work: Path, out: Path, calls: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> list[Path]:
    """Write all finished cases below `work` to as few files as possible, leaving out what exceeds `MOST` files."""
    out.mkdir(parents=True, exist_ok=True)
    members = [*_members(bank, work)]
    first = [(FACTS, msgspec.json.encode(Facts(bank.digest, [dict(call) for call in calls], dict(failed))))]
    files: list[Path] = []
    packed = _Packed(out)
    written = 0
    for group in itertools.chain([first], members, _recordings(bank, work)):
        if written + packed.size(group) > MOST_BYTES:
            break
        if not packed.takes(group):
            files.append(packed.close(len(files)))
            written += files[-1].stat().st_size
            if len(files) == MOST:
                return files
        packed.add(group)
    files.append(packed.close(len(files)))
    return files


def merge(bank: Bank, sources: Sequence[Path], folder: Path) -> Merged:
    """Import bundles, or folders of them, into the folder of results. A bundle of another bank is refused."""
    known = {path.name: path for case in bank.cases for path in (*_files(folder, case), _recording(folder, case))}
    failed: dict[str, str] = {}
    calls: list[Mapping[str, Any]] = []
    cases = set()
    for name in (RUNS, OUTCOMES):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for file in _bundles(sources):
        for name, content in _content(file):
            if name == FACTS:
                told = _facts(file, content)
                if told.bank != bank.digest:
                    raise ConfigError(f"{file} is of another bank ({told.bank}) than {bank.name} ({bank.digest}).")
                failed |= told.failed
                calls += [call for call in told.calls if call not in calls]
            elif name in known:  # by the names that we expect, never by theirs
                draft = known[name].with_suffix(".draft")
                draft.write_bytes(content)
                draft.replace(known[name])
                cases.add(PurePosixPath(name).stem)  # the same for all files of a case
    there = {case.name for case in bank.cases if is_there(folder / RUNS, case)}
    return Merged(len(cases), {name: why for name, why in failed.items() if name not in there}, calls)


def _files(folder: Path, case: Case) -> tuple[Path, Path]:
    return run_of(folder / RUNS, case, "json"), outcome_of(folder / OUTCOMES, case)


def _members(bank: Bank, work: Path) -> Iterator[list[tuple[str, bytes]]]:
    """Yield case by case the two files of each, if both exist."""
    for case in bank.cases:
        paths = _files(work, case)
        if all(path.exists() for path in paths):
            yield [(path.name, path.read_bytes()) for path in paths]


def _recording(folder: Path, case: Case) -> Path:
    return run_of(folder / RUNS, case, "npz")


def _recordings(bank: Bank, work: Path) -> Iterator[list[tuple[str, bytes]]]:
    """Yield recordings of a matrix: first the runs with a false alarm, or without the expected one."""
    there = [case for case in bank.cases if bank.settings and is_there(work / RUNS, case)]
    for case in sorted(there, key=lambda case: not _of_interest(work, case)):
        path = _recording(work, case)
        if path.exists():
            yield [(path.name, path.read_bytes())]


def _of_interest(work: Path, case: Case) -> bool:
    judged = [judge(outcome, OURS) for outcome in read_all([case], work / OUTCOMES)[0]]
    return any(
        any(raised.verdict == "false" for raised in each.raised) or not all(target.hit for target in each.targets)
        for each in judged
    )


class _Packed:
    """One bundle being written, in memory."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._begin()

    def _begin(self) -> None:
        self._raw = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._raw, mode="w:gz", compresslevel=LEVEL)  # noqa: SIM115 - closed below

    def takes(self, group: Sequence[tuple[str, bytes]]) -> bool:
        """Whether the group certainly fits, however badly it compresses."""
        return self.size(group) < LARGEST

    def size(self, group: Sequence[tuple[str, bytes]]) -> int:
        """Return an upper bound of the size in bytes, with this group."""
        return self._raw.tell() + sum(len(content) + 1024 for _, content in group)

    def add(self, group: Sequence[tuple[str, bytes]]) -> None:
        for name, content in group:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            self._tar.addfile(about, io.BytesIO(content))

    def close(self, number: int) -> Path:
        self._tar.close()
        path = self._out / f"{PREFIX}{number}{SUFFIX}"
        path.write_bytes(self._raw.getvalue())
        self._begin()
        return path


def _bundles(sources: Sequence[Path]) -> Iterator[Path]:
    for source in sources:
        found = sorted(source.glob(f"{PREFIX}*{SUFFIX}")) if source.is_dir() else [source]
        if not found:
            raise ConfigError(f"There is no {PREFIX}*{SUFFIX} in {source}.")
        yield from found


def _content(file: Path) -> Iterator[tuple[str, bytes]]:
    content = unpacked(file, WHAT)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is not None:
                    yield member.name, opened.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ConfigError(f"{file} cannot be read as {WHAT}: {error}. Fetch it again.") from error


def _facts(file: Path, content: bytes) -> Facts:
    try:
        return msgspec.json.decode(content, type=Facts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} cannot be read as {WHAT}: {error}. Fetch it again.") from error
