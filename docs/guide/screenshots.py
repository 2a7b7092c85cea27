# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the dashboard that the guides and the README show, on the example that ships with it.

python docs/guide/screenshots.py     # needs playwright, pillow and a Chromium

Beside the pictures, `figures/screens.json` keeps the words and numbers that the pages had when they were taken, and the
palette: tests/project/test_screens.py fails when the pages say something else now.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from fedvitals import palette
from fedvitals.dashboard.example import unpack
from fedvitals.store import open_reader
from fedvitals.store.read.queries import find_run

FIGURES = Path(__file__).with_name("figures")
PAGES = {  # name → path behind the run's own, height
    "overview": ("", 1000),
    "page-client": ("/clients/c7", 900),
    "page-finding": ("/findings/LABEL_NOISE~c7~~", 900),
    "page-round": ("/rounds/5", 560),
    "page-layers": ("/layers", 900),
}


SCREENS = FIGURES / "screens.json"
# What the page says outside of its plots, whose labels depend on fonts and on what has been scrolled into sight.
WORDS = """() => {
    const copy = document.getElementById("main").cloneNode(true);
    const drawn = "svg, canvas, option, .chart-head > :not(.chart-title), .chart-rows, .chart-blank";
    for (const node of copy.querySelectorAll(drawn)) node.remove();
    return copy.textContent;
}"""


def main() -> None:
    """Takes all pictures, and writes down what they show."""
    with example() as run, browser() as chromium:
        words = {name: taken(chromium, run, name, picture=True) for name in PAGES}
    SCREENS.write_text(json.dumps({"palette": colours(), "words": words}, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def example() -> Iterator[str]:
    """Yields the address of the example's run, on a dashboard of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = unpack(Path(folder))
        with open_reader(store) as reader:
            run = find_run(reader, "hospitals")
        command = [sys.executable, "-m", "fedvitals", "ui", "--no-open", "--port", "0", "--store", str(store)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
        try:
            url = re.search(r"http://\S+?(?=/login)", process.stdout.readline())[0]  # type: ignore[union-attr,index]
            yield f"{url}/runs/{run}"
        finally:
            process.terminate()
            process.wait(10)
            process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def browser() -> Iterator[Any]:
    """Yields a Chromium."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


def taken(chromium: Any, run: str, name: str, *, picture: bool) -> list[str]:
    """Opens a page, saves its picture if asked to, and returns its words."""
    path, height = PAGES[name]
    page = chromium.new_page(viewport={"width": 1440, "height": height}, timezone_id="UTC", locale="en-US")
    page.goto(run + path)
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    if picture:
        taken_picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        # Flat colours and letters: a palette loses nothing that one can see.
        taken_picture.quantize(128, dither=Image.Dither.NONE).save(FIGURES / f"{name}.png", optimize=True)
    words = [" ".join(line.split()) for line in re.split(r"[.;]\s", page.evaluate(WORDS))]
    page.close()
    return [line for line in words if line]


def colours() -> str:
    """Returns a digest of the palette."""
    return hashlib.sha256((palette.stylesheet() + palette.javascript()).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
