# SPDX-License-Identifier: Apache-2.0
"""A piece of the study on a machine that is lent for minutes: what a pack's run.py calls (`gpu_pack`).

Results are kept in a folder over there for as long as the machine stays, and come back as one file per piece. On
another machine the files of earlier pieces say what need not be run again.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedvitals.errors import ConfigError
from fedvitals_studies.reproduce import bundle
from fedvitals_studies.reproduce.conditions import CONDITIONS, Condition, chosen, quick, richly
from fedvitals_studies.reproduce.results import Result
from fedvitals_studies.reproduce.study import default_measure, measure_all

BETWEEN_WRITES = 20.0  # seconds: what a machine that is taken back could lose
TOO_MUCH = 60 << 30  # bytes that torch keeps of earlier runs' graphs, before they are given back


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, also where some are left for the next piece; 1: something failed."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no run is begun that would not fit into them")
    parser.add_argument("--out", type=Path, required=True, help="where the results file of this piece goes")
    parser.add_argument("--have", type=Path, nargs="*", default=[], help="results files of earlier pieces")
    parser.add_argument("--only", action="append", default=[], help="a condition, a study, or a pattern")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arrays", action="store_true", help="watch as on a GPU, wherever it is")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: 10 clients, 6 rounds")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=None, help="where results stay here; by default beside the code")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    began = time.time()
    everything = quick("gtsrb") if options.quick else CONDITIONS
    conditions = chosen(everything, options.only)
    if options.arrays or options.device != "cpu":
        conditions = tuple(map(richly, conditions))
    work = options.work or Path(sys.argv[0]).resolve().parent.parent / "work"
    bundle.merge(work, options.have, everything)
    piece = Piece(options.out / f"results-{int(began)}.json.gz")
    try:
        failed = measure_all(
            work,
            conditions,
            repeats=options.repeats,
            measure=default_measure(options.device, arrays=options.arrays),
            data=options.data,
            tell=lambda text: print(f"{time.time() - began:7.1f} s  {text}", flush=True),  # noqa: T201 - a program's words
            minutes=options.minutes,
            device=options.device,
            done=piece.add,
        )
    finally:
        piece.write()
    print(f"{len(piece.results)} results in {piece.path}", flush=True)  # noqa: T201
    return 1 if failed else 0


class Piece:
    """The results of this piece, on disk again and again, since the machine may be taken away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: list[Result] = []
        self._began = time.time()
        self._written = time.perf_counter()

    def add(self, result: Result, condition: Condition) -> None:
        self.results.append(bundle.described(result, condition))
        if time.perf_counter() - self._written > BETWEEN_WRITES:
            self.write()
        _tidy()

    def write(self) -> None:
        bundle.write(self.path, self.results, (self._began, time.time()))
        self._written = time.perf_counter()


def _tidy() -> None:
    """What the last run has left on the device is given back before there is too much of it."""
    import torch  # noqa: PLC0415 - a page is drawn without it

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > TOO_MUCH:
        gc.collect()
        torch.cuda.empty_cache()
