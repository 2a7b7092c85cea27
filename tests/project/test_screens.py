# SPDX-License-Identifier: Apache-2.0
"""The screens of the README and the guides show the pages as they are now."""

import importlib.util
import json
import re

import pytest

from support.dashboard_server import needs_browser
from support.paths import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
GUIDE = ROOT / "docs" / "guide"
AGAIN = "The pages have changed since their pictures were taken: run python docs/guide/screenshots.py and look at them."


@pytest.fixture(scope="module")
def screenshots():
    spec = importlib.util.spec_from_file_location("guide_screenshots", GUIDE / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_of_a_page_was_taken_by_the_script(screenshots):
    known = json.loads(screenshots.SCREENS.read_text(encoding="utf-8"))
    pictures = {path.stem for path in screenshots.FIGURES.glob("*.png")}
    assert pictures == set(screenshots.PAGES) == set(known["words"])
    assert known["palette"] == screenshots.colours(), AGAIN
    shown = re.findall(r"\(([\w/.-]+\.png)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert all((ROOT / link).exists() for link in shown)


@needs_browser
def test_pages_say_what_their_pictures_show(screenshots):
    known = json.loads(screenshots.SCREENS.read_text(encoding="utf-8"))["words"]
    with screenshots.example() as run, screenshots.browser() as chromium:
        for name, words in known.items():
            assert screenshots.taken(chromium, run, name, picture=False) == words, f"{name}. {AGAIN}"
