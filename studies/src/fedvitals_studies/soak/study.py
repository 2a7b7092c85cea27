# SPDX-License-Identifier: Apache-2.0
"""Trains for a while with the dashboard open, and measures what both processes use of the machine.

The last two thirds are judged. The first third is for what fills by design: detectors and the store's writer look back
on 1,000 rounds, which this pace reaches within a quarter of half an hour.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from fedvitals.errors import ConfigError
from fedvitals.store import open_reader
from fedvitals.store.read.queries import attendance
from fedvitals_studies.bench.ui.page import browser_path, serving, unwatched
from fedvitals_studies.soak.visitor import Visitor

RUN = "soak"
PER_SECOND = 2.5  # rounds
EVERY = 5.0  # seconds between two samples, at most
FEWEST_SAMPLES = 18  # so that a sixth of the last two thirds has several
GROWTH_BAR = 2.0  # percent
PATIENCE = 120.0  # seconds until a trainer has ended


@dataclass(frozen=True, slots=True)
class Sample:
    """A process's use of the machine at one moment."""

    process: str
    seconds: float
    resident: int  # bytes
    anonymous: int  # of which not backed by a file
    descriptors: int  # without sockets
    threads: int
    sockets: int  # on a server mostly those of its clients, which open and close them at will


@dataclass(frozen=True, slots=True)
class Soak:
    """Measurements while a trainer and a dashboard ran."""

    minutes: float
    samples: tuple[Sample, ...]
    rounds: int
    lost: int
    stored: int  # rounds found in the store afterwards
    store_bytes: int
    log_bytes: int  # size of the file's log, at the end of the training
    browser: bool
    requests: int
    events: int
    failures: tuple[str, ...]


def soak(minutes: float, tell: Callable[[str], None] = lambda _: None) -> Soak:
    """Train for `minutes` while the dashboard is polled, and open in Chromium if available."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        store = Path(folder) / "soak.db"
        trainer = stack.enter_context(_training(store))
        url, server = stack.enter_context(serving(store))
        browser = browser_path()
        if browser is not None:
            profile = Path(folder) / "browser"
            profile.mkdir()
            stack.enter_context(unwatched(browser, f"{url}/runs/{RUN}", profile))
        with Visitor(url, RUN) as visitor:
            samples = tuple(_samples({"trainer": trainer.pid, "server": server}, 60 * minutes, tell))
        log = _size(store.with_name(f"{store.name}-wal"))
        trainer.terminate()
        ended = json.loads(trainer.communicate(timeout=PATIENCE)[0])
        stack.close()
        return Soak(
            minutes, samples, ended["rounds"], ended["lost"], _stored_rounds(store), _size(store), log,
            browser is not None, visitor.requests, visitor.events, tuple(visitor.failures),
        )  # fmt: skip


@contextlib.contextmanager
def _training(store: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a trainer in a separate process, whose first round is written."""
    command = [sys.executable, "-m", "fedvitals_studies.soak.trainer", str(store), RUN, str(PER_SECOND)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        if not process.stdout or not process.stdout.readline():
            raise ConfigError("The trainer ended before its first round; what it said is above.")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _samples(processes: dict[str, int], seconds: float, tell: Callable[[str], None]) -> Iterator[Sample]:
    """Measure the processes repeatedly for `seconds`."""
    known = {name: psutil.Process(pid) for name, pid in processes.items()}
    every = min(EVERY, seconds / FEWEST_SAMPLES)
    began, said = time.monotonic(), 0.0
    while (at := time.monotonic() - began) < seconds:
        samples = [_sample(name, process, at) for name, process in known.items()]
        yield from samples
        if at >= said:
            tell(f"{at / 60:5.1f} min: " + "; ".join(map(_in_words, samples)))
            said += max(30.0, seconds / 60)
        time.sleep(every)


def _sample(name: str, process: psutil.Process, seconds: float) -> Sample:
    status = Path(f"/proc/{process.pid}/status").read_text()
    kilobytes = dict(line.split(":", 1) for line in status.splitlines())
    anonymous = 1024 * int(kilobytes["RssAnon"].split()[0])
    descriptors, sockets = _descriptors(process.pid)
    resident, threads = process.memory_info().rss, process.num_threads()
    return Sample(name, seconds, resident, anonymous, descriptors, threads, sockets)


def _descriptors(pid: int) -> tuple[int, int]:
    """Return how many open descriptors of a process are not sockets, and how many are."""
    sockets = others = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            is_socket = str(link.readlink()).startswith("socket:")
            sockets, others = sockets + is_socket, others + (not is_socket)
    return others, sockets


def _in_words(sample: Sample) -> str:
    return (
        f"{sample.process} {sample.resident / 1e6:.1f} MB ({sample.anonymous / 1e6:.1f} anonymous), "
        f"{sample.descriptors} descriptors, {sample.sockets} sockets, {sample.threads} threads"
    )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _stored_rounds(store: Path) -> int:
    with open_reader(store) as reader:
        return len(attendance(reader, RUN, ["c0"])["c0"])


def judged(samples: Sequence[Sample], process: str) -> list[Sample]:
    """Return a process's samples of the last two thirds of the time."""
    own = [sample for sample in samples if sample.process == process]
    return [sample for sample in own if sample.seconds >= own[-1].seconds / 3]


def growth(samples: Sequence[Sample], what: str = "resident") -> tuple[float, float]:
    """Return by how many percent memory grew: from the first to the last sixth (medians), and by a Theil-Sen slope."""
    sizes = np.array([getattr(sample, what) for sample in samples], float)
    seconds = np.array([sample.seconds for sample in samples])
    sixth = max(1, len(sizes) // 6)
    first, last = np.median(sizes[:sixth]), np.median(sizes[-sixth:])
    later, earlier = np.tril_indices(len(sizes), -1)
    slope = np.median((sizes[later] - sizes[earlier]) / (seconds[later] - seconds[earlier]))
    return 100 * float(last / first - 1), 100 * float(slope * (seconds[-1] - seconds[0]) / first)


def rows(measured: Soak) -> list[dict[str, Any]]:
    """Return the measurements and their bars: what, bar, measured, verdict."""
    table = []
    for process in ("trainer", "server"):
        own = judged(measured.samples, process)
        table.append(_memory_row(process, own))
        table += [_count_row(process, own, what) for what in ("descriptors", "threads")]
        table.append(_sockets_row(process, own))
    absent = measured.rounds - measured.stored
    failures = [str(len(measured.failures)), *dict.fromkeys(measured.failures)]
    asked = f"{measured.requests:,} requests, {measured.events:,} live events, failures: {'; '.join(failures)[:500]}"
    pages = "polled, and open in Chromium" if measured.browser else "polled; no Chromium on this machine"
    size = f"{measured.store_bytes / 1e6:.1f} MB; {measured.log_bytes / 1e6:.1f} MB"
    table += [
        _row("records lost", "0", str(measured.lost), met=measured.lost == 0),
        _row("rounds trained; of these, not in the store", "0", f"{measured.rounds:,}; {absent}", met=absent == 0),
        _row(f"dashboard, {pages}", "0 failures", asked, met=not measured.failures),
        _row("store; its log while it trained", "", size, met=None),
    ]
    return table


def _memory_row(process: str, own: Sequence[Sample]) -> dict[str, Any]:
    medians, slope = growth(own)
    anonymous, _ = growth(own, "anonymous")
    measured = (
        f"{medians:+.2f} % by medians, {slope:+.2f} % by slope ({own[0].resident / 1e6:.1f} to "
        f"{own[-1].resident / 1e6:.1f} MB; anonymous {anonymous:+.2f} %)"
    )
    return _row(f"{process}: memory", f"≤ {GROWTH_BAR:g} %", measured, met=max(medians, slope) <= GROWTH_BAR)


def _count_row(process: str, own: Sequence[Sample], what: str) -> dict[str, Any]:
    counts = [getattr(sample, what) for sample in own]
    sixth = max(1, len(counts) // 6)
    first, last = float(np.median(counts[:sixth])), float(np.median(counts[-sixth:]))
    measured = f"{first:g} to {last:g} (medians), between {min(counts)} and {max(counts)}"
    return _row(f"{process}: {what}", "constant", measured, met=last <= first)


def _sockets_row(process: str, own: Sequence[Sample]) -> dict[str, Any]:
    """Return the row on sockets: a browser opens more for a while, and closes them; a leak raises the minimum."""
    counts = [sample.sockets for sample in own]
    third = max(1, len(counts) // 3)
    first, last = min(counts[:third]), min(counts[-third:])
    measured = f"at least {first} at first, {last} in the end; between {min(counts)} and {max(counts)}"
    return _row(f"{process}: sockets", "no more left open", measured, met=last <= first)


def _row(what: str, bar: str, measured: str, *, met: bool | None) -> dict[str, Any]:
    return {"what": what, "bar": bar, "measured": measured, "verdict": {True: "met", False: "missed", None: ""}[met]}
