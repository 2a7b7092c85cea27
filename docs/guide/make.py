# SPDX-License-Identifier: Apache-2.0
"""Plays the guides: every block of code in order, in a folder of its own, and draws the pictures that follow them.

    python docs/guide/make.py            # draws docs/guide/figures again
    python docs/guide/make.py debug      # those of one guide

A block ```python is run in the guide's own namespace; a block ```sh line by line, if the line is a `fedvitals` command.
A picture `![words](figures/NAME.svg)` after a block is its `figure`. tests/project/test_guide.py plays the same.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GUIDES = ("monitor", "debug", "profile", "gradient_scale", "notebooks", "llm")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: small models gain nothing from more
_PARTS = re.compile(r"^```(python|sh)\n(.*?)^```$|^!\[([^\]]*)\]\(figures/([\w-]+)\.svg\)$", re.DOTALL | re.MULTILINE)


@dataclass
class Played:
    """What a guide gave: its pictures as SVG, and what its commands printed."""

    pictures: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)


def play(guide: Path) -> Played:
    """Runs a guide in the folder where we are."""
    played, names = Played(), {"__name__": "guide"}
    for kind, code, words, picture in _PARTS.findall(guide.read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(code, str(guide), "exec"), names)  # noqa: S102 - the guide's own code
        elif kind == "sh":
            for line in code.splitlines():
                if line.startswith("fedvitals "):
                    played.codes[line], played.said[line] = _command(line)
        else:
            played.pictures[picture] = _picture(names, picture, words)
    return played


def _command(line: str) -> tuple[int, str]:
    from fedvitals.cli.main import main  # noqa: PLC0415 - slow to load

    said = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(said):
        try:
            main(shlex.split(line, comments=True)[1:])
        except SystemExit as done:
            code = int(done.code or 0)
    return code, said.getvalue()


def _picture(names: dict[str, Any], name: str, words: str) -> str:
    from fedvitals.plot.svg import svg_of  # noqa: PLC0415 - slow to load

    return svg_of(names.pop("figure"), words, name)  # taken away, so that no picture is shown twice by mistake


def main() -> None:
    """Draws the pictures of all guides, or of those that are named."""
    for name in sys.argv[1:] or GUIDES:
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                played = play(HERE / f"{name}.md")
            finally:
                os.chdir(before)
        for picture, svg in played.pictures.items():
            file = HERE / "figures" / f"{picture}.svg"
            file.write_text(svg, encoding="utf-8")
            print(f"{file.relative_to(HERE)}  {len(svg) / 1000:.0f} kB")
        for line, said in played.said.items():
            print(f"\n$ {line}\n{said}")


if __name__ == "__main__":
    main()
