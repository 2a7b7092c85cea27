# SPDX-License-Identifier: Apache-2.0
"""Prints a page as PDF with an installed Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fedvitals.errors import ConfigError

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
    "microsoft-edge",
)
ELSEWHERE = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
SECONDS = 120


def browser() -> str | None:
    """Return the path of a Chromium; FEDVITALS_CHROMIUM takes precedence over those on the path."""
    named = os.environ.get("FEDVITALS_CHROMIUM")
    program = shutil.which(named) if named else next((path for name in BROWSERS if (path := shutil.which(name))), None)
    return program or (None if named else next((path for path in ELSEWHERE if Path(path).exists()), None))


def pdf_of(html: str) -> bytes:
    """Return the page as PDF. ConfigError: no browser is installed, or it failed."""
    program = browser()
    if program is None:
        raise ConfigError(
            "A PDF is printed by Chromium, and none was found. Install `chromium` or `google-chrome` (Debian: "
            "apt install chromium), or name one in FEDVITALS_CHROMIUM; or write HTML (-o FILE.html), which any "
            "browser prints."
        )
    with tempfile.TemporaryDirectory(prefix="fedvitals-pdf-") as folder:
        page, paper = Path(folder) / "page.html", Path(folder) / "page.pdf"
        page.write_text(html, encoding="utf-8")
        command = [
            program, "--headless", "--disable-gpu", "--disable-extensions", "--disable-dev-shm-usage",
            "--no-first-run", "--no-pdf-header-footer", f"--user-data-dir={folder}/profile", f"--print-to-pdf={paper}",
            page.as_uri(),
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Chromium's sandbox does not work for root
            command.insert(1, "--no-sandbox")
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)  # noqa: S603 - a fixed command
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{program} could not print the page: {error}. -o FILE.html works without it.") from error
        if not paper.exists():
            last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"{program} printed no page: {''.join(last_line)[:300]}. -o FILE.html works without it.")
        return paper.read_bytes()
