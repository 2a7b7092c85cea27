# SPDX-License-Identifier: Apache-2.0
"""Writes the digits app (`flower.digits_app`) as a folder for `flwr run`, with the lines that fedvitals needs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from fedvitals.errors import ConfigError, unknown

PACKAGE = "patient"
IMPORT = "import fedvitals as fv\n"
Edits = Mapping[str, Mapping[str, str]]  # file → line as it is → line with fedvitals

TWO_LINES: Edits = {
    "client_app.py": {"app = ClientApp()": "app = ClientApp(mods=[fv.flower.client_mod()])"},
    "server_app.py": {
        "strategy = averaging(config)": 'strategy = fv.flower.attach(averaging(config), fv.Monitor(config["store"]))'
    },
}
DEEP: Edits = {
    **TWO_LINES,
    "task.py": {"with nullcontext():": "with fv.watch(model, optimizer, data=loader, loss=loss_of):"},
}
ALTERNATING: Edits = {
    "../pyproject.toml": {
        'serverapp = "patient.server_app:app"': 'serverapp = "patient.alternating:server"',
        'clientapp = "patient.client_app:app"': 'clientapp = "patient.alternating:client"',
    }
}
WATCHED: Mapping[str, Edits] = {"": {}, "two-lines": TWO_LINES, "deep": DEEP, "alternating": ALTERNATING}


def write_app(folder: Path, watched: str = "") -> Path:
    """Write the app to `folder`, replacing it: as it is (""), with «two-lines», «deep» or «alternating»."""
    if watched not in WATCHED:
        raise ConfigError(unknown("way to watch the patient", watched, WATCHED))
    package = folder / PACKAGE
    package.mkdir(parents=True)
    with resources.as_file(resources.files("fedvitals_studies.flower") / "digits_app") as source:
        for file in source.glob("*.py"):
            shutil.copyfile(file, package / file.name)
        shutil.copyfile(source / "pyproject.toml", folder / "pyproject.toml")
    if watched != "alternating":
        (package / "alternating.py").unlink()  # the only file that refers to fedvitals
    for name, lines in WATCHED[watched].items():
        _edit(package / name, lines)
    return folder


def _edit(file: Path, lines: Mapping[str, str]) -> None:
    text = file.read_text(encoding="utf-8")
    for before, after in lines.items():
        if text.count(before) != 1:
            raise ConfigError(f"{file} must have the line '{before}' once, and has it {text.count(before)} times.")
        text = text.replace(before, after)
    if file.suffix == ".py":
        first = "from __future__ import annotations\n\n"
        text = text.replace(first, first + IMPORT, 1)
    file.write_text(text, encoding="utf-8")
