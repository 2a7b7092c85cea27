# SPDX-License-Identifier: Apache-2.0
"""The report's figures as blocks. Where a picture cannot be drawn, the page says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedvitals.errors import MissingExtraError
from fedvitals.plot.svg import svg_of
from fedvitals.report.markup import Block, Picture, Text, literal, words_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pictures:
    """Draws pictures and gives each a name of its own, which its ids and files use."""

    def __init__(self, folder: str = "figures") -> None:
        self.folder = folder
        self._names: set[str] = set()

    def of(self, name: str, words: str, draw: Callable[[], Figure], caption: str = "") -> Block:
        """Return the picture. `words` describe it for screen readers."""
        place = 1
        unique = name
        while unique in self._names:
            place += 1
            unique = f"{name}-{place}"
        self._names.add(unique)
        try:
            svg = svg_of(draw(), words_of(words), unique)
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - odd records must not cost the rest of the report
            return Text(f"The picture «{words}» could not be drawn: {literal(repr(error), 300)}.", "quiet")
        return Picture(svg, f"{self.folder}/{unique}.svg", words, caption)
