# SPDX-License-Identifier: Apache-2.0
"""Plays the guides: every block of code in order, in a folder of its own, and draws the pictures that follow them.

    python docs/guide/make.py            # draws docs/guide/figures again
    python docs/guide/make.py debug      # those of one guide

How blocks are run: scripts/documentation/code_blocks.py. A picture `![words](figures/NAME.svg)` after a block is
its `figure`. tests/project/test_guide.py plays the same.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

from documentation.code_blocks import Block, Player, blocks_of  # noqa: E402 - found by the line above

GUIDES = ("monitor", "debug", "profile", "prove", "gradient_scale", "notebooks", "llm", "privacy", "detector")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: small models gain nothing from more
_PICTURE = re.compile(r"^!\[([^\]]*)\]\(figures/([\w-]+)\.svg\)$", re.MULTILINE)


@dataclass
class Played:
    """What a guide gave: its pictures as SVG, and what its commands printed."""

    pictures: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)


def play(guide: Path) -> Played:
    """Runs a guide in the folder where we are."""
    player, pictures = Player(), {}
    text = guide.read_text(encoding="utf-8")
    parts = [(block.line, block) for block in blocks_of(guide)]
    parts += [(text[: match.start()].count("\n"), match) for match in _PICTURE.finditer(text)]
    for _, part in sorted(parts, key=lambda pair: pair[0]):
        if isinstance(part, Block):
            player.run(part)
        else:
            pictures[part[2]] = _picture(player.names, part[2], part[1])
    return Played(pictures, player.printed, player.codes)


def _picture(names: dict[str, Any], name: str, words: str) -> str:
    from fedvitals.plot.svg import svg_of  # noqa: PLC0415 - slow to load

    return svg_of(names.pop("figure"), words, name)  # taken away, so that no picture is shown twice by mistake


def look_of(svg: str) -> tuple[set[str], set[str]]:
    """Returns a picture's words without numbers, names with digits and units of time, and its colours: what does not
    depend on how a training went, or how long it took.
    """
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    words = {re.sub(r" \((?:µs|ms|s|min)\)$", "", " ".join(text.split())) for text in texts}
    return {text for text in words if text and not re.search(r"\d", text)}, set(re.findall(r"#[0-9a-f]{6}\b", svg))


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
