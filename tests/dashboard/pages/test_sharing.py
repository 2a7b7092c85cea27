# SPDX-License-Identifier: Apache-2.0
"""«Share» on every page: the report as HTML and PDF, the link, and a picture of the page, without any network."""

import io

import httpx2
import pytest
from PIL import Image

from fedvitals.dashboard.example import unpack
from fedvitals.report import pdf
from fedvitals.store import open_reader
from fedvitals.store.read.queries import find_run
from support.dashboard_server import expect, judge, ready, serve

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
OPENED = {"permissions": ["clipboard-read", "clipboard-write"], "accept_downloads": True}


@pytest.fixture(scope="module")
def site(session_folder):
    folder = session_folder / "shared"
    folder.mkdir(exist_ok=True)
    store = unpack(folder)
    with open_reader(store) as reader:
        runs = [find_run(reader, name) for name in ("hospitals", "hospitals, all well")]
    with serve(store) as url:
        yield url, runs


def chosen(page, entry):
    page.get_by_role("button", name="share", exact=True).click()
    page.get_by_role("menuitem", name=entry).click()


def downloaded(page, entry):
    with page.expect_download(timeout=120_000) as download:  # a report takes its time on a busy machine
        chosen(page, entry)
    return download.value.suggested_filename, download.value.path().read_bytes()


@pytest.mark.parametrize("page", [OPENED, {**OPENED, "color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_a_page_is_shared_as_link_report_and_picture(page, site):
    url, (run, _) = site
    ready(page, f"{url}/runs/{run}/clients/c7", "client")
    page.wait_for_load_state("networkidle")
    page.get_by_role("button", name="share", exact=True).click()
    assert judge(page) == []
    page.keyboard.press("Escape")
    chosen(page, "Copy link")
    expect(page.locator(".share-said")).to_have_text("link copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    name, data = downloaded(page, "Report (HTML)")
    assert name == "hospitals-report.html"
    assert b"What happened" in data
    name, data = downloaded(page, "Picture (PNG)")
    assert name == "hospitals-clients.png"
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    assert picture.width == 2 * page.evaluate("document.documentElement.clientWidth")
    seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    drawn = picture.resize((seen.width, picture.height // 2)).crop((0, 0, seen.width, seen.height))
    small = [one.resize((72, 50), Image.Resampling.BOX).tobytes() for one in (seen, drawn)]
    apart = [abs(a - b) for a, b in zip(*small, strict=True)]
    assert sum(apart) / len(apart) / 255 < 0.03  # the same page


@pytest.mark.parametrize("page", [OPENED], indirect=True)
def test_runs_that_are_compared_have_a_report_of_their_own(page, site):
    url, runs = site
    ready(page, f"{url}/compare?runs={','.join(runs)}", "compare")
    _, data = downloaded(page, "Report (HTML)")
    order = [data.index(words) for words in (b"What happened", b"Where they diverge", b"Evidence", b"Appendix")]
    assert order == sorted(order)
    ready(page, str(url), "runs")
    page.get_by_role("button", name="share", exact=True).click()
    assert page.get_by_role("menuitem").all_inner_texts() == ["Copy link", "Picture (PNG)"]


@pytest.mark.skipif(pdf.browser() is None, reason="no Chromium on this machine (Debian: apt install chromium)")
def test_a_report_comes_as_pdf(site):
    url, (run, _) = site
    answer = httpx2.get(f"{url}/api/report", params={"runs": run, "format": "pdf"}, timeout=120)
    assert answer.status_code == 200
    assert answer.content.startswith(b"%PDF")
    assert answer.headers["content-disposition"] == 'attachment; filename="hospitals-report.pdf"'
    assert httpx2.get(f"{url}/api/report", params={"runs": "nobody"}).status_code == 404
