# SPDX-License-Identifier: Apache-2.0
"""Every page with a small and a large run, in a real browser: drawn, accessible, light and dark, wide and narrow."""

import io
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from fedvitals.dashboard.example import unpack
from fedvitals.store import open_reader
from fedvitals.store.read.queries import find_run
from support import plotted_runs
from support.dashboard_server import judge, ready, serve
from support.paths import GOLDEN
from support.shown_runs import LARGE, invented

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
GOLDEN = GOLDEN / "pages"
SMALLER = 8  # pixels of a screenshot that become one: letters blur, what is missing does not
ALLOWED = 0.035  # mean difference of grey, of 1

# View → path behind the run's own.
PAGES = {
    "overview": "", "clients": "/clients", "client": "/clients/c7", "map": "/map", "layers": "/layers",
    "rounds": "/rounds", "round": "/rounds/3", "topology": "/topology", "findings": "/findings",
    "replay": "/replay",
}  # fmt: skip
EVERY = ["runs", "compare", *PAGES, "finding"]


@pytest.fixture(scope="module")
def example(session_folder: Path):
    folder = session_folder / "example"
    folder.mkdir(exist_ok=True)
    store = unpack(folder)
    with open_reader(store) as reader:
        runs = [find_run(reader, name) for name in ("hospitals", "hospitals, all well")]
    with serve(store) as url:
        yield url, runs


@pytest.fixture(scope="module")
def large(session_folder: Path):
    with serve(invented(session_folder / "large.db", LARGE)) as url:
        yield url, [LARGE.run, LARGE.run]


def _address(site, view: str) -> str:
    url, (run, other) = site
    if view == "runs":
        return url
    if view == "compare":
        return f"{url}/compare?runs={run},{other}"
    if view == "finding":
        return f"{url}/runs/{run}/findings/{_first_case(url, run)}"
    return f"{url}/runs/{run}{PAGES[view]}"


def _first_case(url: str, run: str) -> str:
    import httpx2

    found = httpx2.get(f"{url}/api/runs/{run}/findings").json()
    return quote(found["cases"][0]["key"], safe="")


@pytest.mark.parametrize("view", EVERY)
@pytest.mark.parametrize("page", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_a_page_is_drawn_and_nothing_is_held_against_it(page, example, view: str) -> None:
    ready(page, _address(example, view), view)
    page.wait_for_load_state("networkidle")
    assert page.title().endswith("fedvitals")
    assert page.locator("main").inner_text().strip()
    assert judge(page) == []


@pytest.mark.parametrize("view", [view for view in EVERY if view not in ("client", "compare")])
def test_a_page_of_a_large_run_is_drawn(page, large, view: str) -> None:
    ready(page, _address(large, view), view)
    page.wait_for_load_state("networkidle")
    assert len(page.locator("main").inner_text()) > 50
    nodes = page.evaluate("document.querySelectorAll('*').length")
    assert nodes < 12_000, "a page must not grow with the run"


@pytest.fixture(scope="module")
def long_names(session_folder: Path):
    """Clients, layers and runs with names of up to 300 characters, without a place to break them."""
    with serve(plotted_runs.write(session_folder / "long-names.db")) as url:
        yield url, [plotted_runs.HOSTILE, plotted_runs.FULL]


@pytest.mark.parametrize("site", ["example", "long_names"])
@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 844}}], indirect=True, ids=["phone"])
def test_no_page_is_wider_than_a_phone(page, site: str, request: pytest.FixtureRequest) -> None:
    for view in EVERY:
        ready(page, _address(request.getfixturevalue(site), view), view)
        page.wait_for_load_state("networkidle")
        wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room, view


@pytest.mark.parametrize("view", EVERY)
@pytest.mark.parametrize("page", [{"viewport": {"width": 3840, "height": 2160}}], indirect=True, ids=["wall"])
def test_a_page_is_readable_on_a_wall(page, example, view: str) -> None:
    ready(page, _address(example, view), view)
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 15
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") <= 2500


def reduced(png: bytes) -> np.ndarray:
    grey = Image.open(io.BytesIO(png)).convert("L")
    return np.asarray(grey.resize((grey.width // SMALLER, grey.height // SMALLER), Image.Resampling.BOX))


def different(picture: np.ndarray, two: np.ndarray) -> float:
    assert picture.shape == two.shape
    return float(np.abs(picture.astype(float) - two.astype(float)).mean()) / 255


@pytest.mark.parametrize("view", EVERY)
def test_a_page_looks_as_it_did(page, example, view: str, request: pytest.FixtureRequest) -> None:
    """`FEDVITALS_GOLDEN=new` takes the pictures anew: look at them before they are committed."""
    import os

    ready(page, _address(example, view), view)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    now = reduced(page.screenshot())
    golden = GOLDEN / f"{view}.png"
    if os.environ.get("FEDVITALS_GOLDEN") == "new":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        Image.fromarray(now).save(golden, optimize=True)
    assert different(now, np.asarray(Image.open(golden))) < ALLOWED


def test_the_comparison_sees_a_page_without_its_plots(page, example) -> None:
    ready(page, _address(example, "overview"), "overview")
    page.wait_for_load_state("networkidle")
    page.evaluate("for (const one of document.querySelectorAll('main svg, main canvas')) one.remove()")
    assert different(reduced(page.screenshot()), np.asarray(Image.open(GOLDEN / "overview.png"))) > ALLOWED
