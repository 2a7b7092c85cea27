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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedvitals.errors import ConfigError
from fedvitals_studies.reproduce import bundle
from fedvitals_studies.reproduce.conditions import (
    CONDITIONS,
    SETTLING,
    Condition,
    chosen,
    quick,
    quick_factorial,
    richly,
)
from fedvitals_studies.reproduce.factorial import REPEATS, phases
from fedvitals_studies.reproduce.parallel import run_shares
from fedvitals_studies.reproduce.results import Result
from fedvitals_studies.reproduce.study import default_measure, measure_all, plan

BETWEEN_WRITES = 20.0  # seconds: what a machine that is taken back could lose


def main(arguments: Sequence[str]) -> int:
    """Run a piece. Exit code 0, even if some runs are left for the next piece; 1: something failed."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--study", choices=("gsc", "factorial"), default="gsc")
    parser.add_argument("--minutes", type=float, default=8.0, help="no run is begun that would not fit into them")
    parser.add_argument("--out", type=Path, required=True, help="where the results file of this piece goes")
    parser.add_argument("--have", type=Path, nargs="*", default=[], help="results files of earlier pieces")
    parser.add_argument("--only", action="append", default=[], help="a condition, a study, or a pattern")
    parser.add_argument("--repeats", type=int, default=None, help="by default 3; of the factorial's cells 5")
    parser.add_argument("--dataset", default="gtsrb", help="of a rehearsal")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arrays", action="store_true", help="watch as on a GPU, wherever it is")
    parser.add_argument(
        "--quick", action="store_true", help="a rehearsal: 10 clients, 6 rounds; of the factorial 4 and 4"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=None, help="where results stay here; by default beside the code")
    parser.add_argument("--merged", action="store_true", help="earlier results are in the work folder already")
    parser.add_argument("--together", action="store_true", help="the factorial in eight processes at a time")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    began = time.time()
    small = (lambda c: quick_factorial(c, options.dataset)) if options.quick else (lambda c: c)
    own = quick(options.dataset) if options.quick else CONDITIONS
    everything = tuple(dict.fromkeys((*own, *map(small, SETTLING))))
    work = options.work or Path(sys.argv[0]).resolve().parent.parent / "work"
    if not options.merged:
        packed = Path(sys.argv[0]).resolve().parent / bundle.DONE
        have = [packed, *options.have] if packed.exists() and not options.quick else options.have
        bundle.merge(work, have, everything)
    if options.together:
        for conditions, usual in _phases(options, work, everything, small):
            repeats = options.repeats or usual
            left = plan(work, conditions, repeats, options.device).todo
            if left:  # what follows depends on it
                return run_shares(sys.argv[0], _of_a_share(options, work, repeats), options.out, left)
    piece = Piece(options.out / f"results-{int(began)}.json.gz")
    failed: list[str] = []
    try:
        for conditions, repeats in _phases(options, work, everything, small):
            failed += measure_all(
                work,
                conditions,
                repeats=options.repeats or repeats,
                measure=default_measure(options.device, arrays=options.arrays),
                data=options.data,
                tell=lambda text: print(f"{time.time() - began:7.1f} s  {text}", flush=True),  # noqa: T201
                minutes=options.minutes - (time.time() - began) / 60,
                device=options.device,
                done=piece.add,
            )
    finally:
        piece.write()
    print(f"{len(piece.results)} results in {piece.path}", flush=True)  # noqa: T201
    return 1 if failed else 0


def _of_a_share(options: argparse.Namespace, work: Path, repeats: int) -> list[str]:
    """Return the arguments of each of several processes, without its cells and its folder."""
    words = ["--study", "factorial", "--merged", "--work", str(work)]
    words += ["--minutes", str(options.minutes), "--device", str(options.device), "--repeats", str(repeats)]
    words += ["--quick", "--dataset", str(options.dataset)] if options.quick else []
    words += ["--arrays"] if options.arrays else []
    return words + (["--data", str(options.data)] if options.data is not None else [])


def _phases(
    options: argparse.Namespace, work: Path, everything: Sequence[Condition], small: Callable[[Condition], Condition]
) -> Iterable[tuple[Sequence[Condition], int]]:
    """Return what is run, and how often: what was named, or the whole study."""
    if options.study == "factorial" and not options.only:
        return phases(work, small, options.repeats)
    repeats = REPEATS if options.study == "factorial" else 3
    own = everything if options.only else quick(options.dataset) if options.quick else CONDITIONS
    conditions = chosen(own, options.only)
    if options.arrays or options.device != "cpu":
        conditions = tuple(map(richly, conditions))
    return [(conditions, repeats)]


class Piece:
    """The results of this piece, written repeatedly, since the machine may be taken away."""

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
    """Free what the last run has left on the device, which other processes may need."""
    import torch  # noqa: PLC0415 - a page is drawn without it

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
