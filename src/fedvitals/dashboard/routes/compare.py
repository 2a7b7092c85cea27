# SPDX-License-Identifier: Apache-2.0
"""Route of the comparison of two to six runs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import Request, Response, Router
from fedvitals.store.read.queries import find_run
from fedvitals.store.read.reader import Reader
from fedvitals.views.comparison.page import ComparePage, compare_page
from fedvitals.views.comparison.runs import chosen, sides_of
from fedvitals.views.run_figures import Figures, figures_of

router = Router("compare")
MOST = 6  # sides
REPEATS = 10  # runs of a side, the newest
Name = Annotated[str, Meta(min_length=1, max_length=300)]


@router.get("/api/compare", ComparePage)
def compare(
    request: Request,
    runs: Annotated[list[Name], Meta(min_length=2, max_length=MOST)],
    baseline: Annotated[str, Meta(max_length=300)] | None = None,
    repeats: bool = False,
) -> Response:
    """Runs against the `baseline` (else the first), each an id, a name, or the beginning of an id.

    Runs of one name and one configuration, which differ by their seeds only, are one side. With `repeats`, all such
    runs in the store are taken, not only those named: of each side the newest ten.
    """
    cache, known = request.app.state.reader_cache, request.app.state.compared

    def meant(reader: Reader) -> list[str]:
        ids = list(dict.fromkeys(find_run(reader, run) for run in runs))
        first = ids[0] if baseline is None else find_run(reader, baseline)
        return chosen(reader, [first, *(run for run in ids if run != first)], repeats=repeats, most=REPEATS)

    def figures(reader: Reader, run: str) -> Figures:
        """Return the figures of a run, cached until it changes: adding a run does not mean waiting for the others
        again.
        """
        read: Figures = known.get(run, cache.tracker.version(run), lambda: figures_of(reader, run))
        return read

    def work(reader: Reader) -> ComparePage:
        return compare_page(sides_of(reader, meant(reader), figures=figures))

    return answer(request, None, work, about=meant)
