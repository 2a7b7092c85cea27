# SPDX-License-Identifier: Apache-2.0
"""Route of the comparison of two to six runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import StringConstraints

from fedvitals.dashboard.answers import answer
from fedvitals.errors import ConfigError
from fedvitals.store.read.queries import find_run
from fedvitals.store.read.reader import Reader
from fedvitals.views.comparison.page import ComparePage, compare_page
from fedvitals.views.comparison.runs import chosen, sides_of
from fedvitals.views.run_figures import Figures, figures_of

router = APIRouter(tags=["compare"])
MOST = 6  # sides
REPEATS = 10  # runs of a side, the newest
REMEMBERED = 80  # runs
Name = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class Remembered:
    """Figures of runs, until they change: who adds a run to a comparison does not wait for the others again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: OrderedDict[tuple[str, str], Figures] = OrderedDict()

    def figures(self, reader: Reader, run: str, version: str) -> Figures:
        """Return the figures of a run at this version, read once."""
        with self._lock:
            known = self._figures.get((run, version))
        if known is None:
            known = figures_of(reader, run)
        with self._lock:
            for old in [key for key in self._figures if key[0] == run]:
                del self._figures[old]
            self._figures[run, version] = known
            while len(self._figures) > REMEMBERED:
                self._figures.popitem(last=False)
        return known


@router.get("/api/compare", response_model=ComparePage)
def compare(
    request: Request,
    runs: Annotated[list[Name], Query(min_length=2, max_length=MOST)],
    baseline: Annotated[str | None, Query(max_length=300)] = None,
    repeats: bool = False,
) -> Response:
    """Runs against the `baseline` (else the first), each an id, a name, or the beginning of an id.

    Runs of one name and one configuration, which differ by their seeds only, are one side. With `repeats`, all such
    runs in the store are taken, not only those named: of each side the newest ten.
    """
    cache = request.app.state.reader_cache
    state = request.app.state
    if not hasattr(state, "compared"):
        state.compared = Remembered()

    def meant(reader: Reader) -> list[str]:
        try:
            ids = list(dict.fromkeys(find_run(reader, run) for run in runs))
            first = ids[0] if baseline is None else find_run(reader, baseline)
        except ConfigError as error:
            raise HTTPException(404, str(error)) from error
        return chosen(reader, [first, *(run for run in ids if run != first)], repeats=repeats, most=REPEATS)

    def work(reader: Reader) -> ComparePage:
        known = lambda reader, run: state.compared.figures(reader, run, cache.version(run))  # noqa: E731
        return compare_page(sides_of(reader, meant(reader), figures=known))

    return answer(request, None, work, about=meant)
