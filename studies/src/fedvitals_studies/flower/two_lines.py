# SPDX-License-Identifier: Apache-2.0
"""Add the two lines that fedvitals needs to the copy of a third-party Flower app."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fedvitals.errors import FedvitalsError

IMPORT = "import fedvitals as _fedvitals\n"
MOD = "_fedvitals.flower.client_mod()"
INSIDE = r"(?:[^()]|\([^()]*\))*?"  # arguments, possibly with calls
Pattern = tuple[re.Pattern[str], str]  # what an app contains, and its replacement

CLIENT_LINES: Sequence[Pattern] = (
    (re.compile(r"\bClientApp\(\s*\)"), f"ClientApp(mods=[{MOD}])"),
    (re.compile(rf"(\bClientApp\({INSIDE}\bmods\s*=\s*\[)"), rf"\1{MOD}, "),
    (re.compile(r"(\bClientApp\(\s*(?:client_fn\s*=\s*)?\w+)\s*,?\s*\)"), rf"\1, mods=[{MOD}])"),
)
ATTACH = r"_fedvitals.flower.attach(\g<what>, _fedvitals.Monitor(%r))"
SERVER_LINES: Sequence[Pattern] = (
    (re.compile(r"(?<![\w.])(?P<what>\w*strategy\w*)\.start\("), ATTACH + ".start("),
    (
        re.compile(rf"(?P<before>\b(?:ServerAppComponents|LegacyContext)\({INSIDE}\bstrategy\s*=\s*)(?P<what>\w+)"),
        r"\g<before>" + ATTACH,
    ),
)


class NoPlaceError(FedvitalsError):
    """An app has no place in its code where one of our lines is known to belong."""


def add_two_lines(app: Path, store: Path) -> None:
    """Edit the app in this folder so that its clients have the mod, and its server writes to the store.

    Raises NoPlaceError if there is no ClientApp, or no strategy that is started or handed over by name.
    """
    files = [file for file in sorted(app.rglob("*.py")) if not file.is_relative_to(app / ".venv")]
    _edit(files, CLIENT_LINES, "ClientApp")
    _edit(files, [(pattern, line % str(store)) for pattern, line in SERVER_LINES], "strategy")


def _edit(files: Sequence[Path], lines: Sequence[Pattern], missing: str) -> None:
    for file in files:
        text = file.read_text(encoding="utf-8")
        for pattern, line in lines:
            edited, count = pattern.subn(line, text, count=1)
            if count:
                file.write_text(_with_import(edited), encoding="utf-8")
                return
    raise NoPlaceError(f"There is no {missing} in the app's code in a form that is known here.")


def _with_import(text: str) -> str:
    if IMPORT in text:
        return text
    first = re.search(r"^(?:import|from) (?!__future__)", text, re.MULTILINE)
    at = 0 if first is None else first.start()
    return text[:at] + IMPORT + text[at:]
