# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the dashboard that the guides and the README show, on the example that ships with it.

python docs/guide/screenshots.py     # needs playwright, pillow and a Chromium
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = unpack(Path(folder))
        with open_reader(store) as reader:
            run = find_run(reader, "hospitals")
        command = [sys.executable, "-m", "fedvitals.cli", "ui", "--no-open", "--port", "0", "--store", str(store)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
        try:
            url = re.search(r"http://\S+?(?=/?\s)", process.stdout.readline())[0]  # type: ignore[union-attr,index]
            take(f"{url}/runs/{run}")
        finally:
            process.terminate()
            process.wait(10)


def take(run: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (path, height) in PAGES.items():
            page = browser.new_page(viewport={"width": 1440, "height": height})
            page.goto(run + path)
            page.wait_for_selector("html[data-ready]", state="attached")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(500)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            # Flat colours and letters: a palette loses nothing that one can see.
            picture.quantize(128, dither=Image.Dither.NONE).save(FIGURES / f"{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
