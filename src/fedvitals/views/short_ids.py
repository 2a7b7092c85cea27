# SPDX-License-Identifier: Apache-2.0
"""Shortens long names in one way: numbers of nodes to their last digits, other names to the part that differs.

For tables and plots. Sentences and details have the full name, so that it can be copied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

LONG = 12  # digits from which nobody reads a number to its end
TAIL = 6  # digits shown of such a number; the dashboard shows as many (parts/who.js)


def short(node: str) -> str:
    """Return the last digits of a long number, «…474769»; any other name unchanged."""
    return f"…{node[-TAIL:]}" if len(node) >= LONG and node.isascii() and node.isdigit() else node


def differing_parts(names: Sequence[str], most: int) -> list[str]:
    """Return names in at most `most` characters each, longer ones reduced to the part in which they differ.

    Words at the beginning that all longer names share are replaced by «…»: «…lr0.1-seed3». If a name is still too long,
    its middle is cut.
    """
    longer = {name for name in names if len(name) > most}
    shared = _shared_beginning(*longer) if len(longer) > 1 else ""
    words = max((match.end() for match in re.finditer(r"[\W_]", shared)), default=0)
    return [_without_middle(f"…{name[words:]}" if words > 1 else name, most) if name in longer else name
            for name in names]  # fmt: skip


def _without_middle(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    tail = (most - 1) // 2
    return f"{name[: most - 1 - tail]}…{name[len(name) - tail :]}"


def _shared_beginning(*names: str) -> str:
    return "".join(letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False)))


def distinct_beginnings(names: Sequence[str], least: int) -> list[str]:
    """Return a unique beginning of each name, at least `least` characters; the full name if there is none."""
    ordered = sorted(set(names))
    needed = {}
    for before, name, after in zip(["", *ordered], ordered, [*ordered[1:], ""], strict=False):
        shared = max(len(_shared_beginning(name, other)) for other in (before, after))
        needed[name] = name[: max(least, shared + 1)]
    return [needed[name] for name in names]
