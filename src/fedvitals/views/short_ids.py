# SPDX-License-Identifier: Apache-2.0
"""Long numbers that name nodes, shortened in one way: by their last digits, in tables and pictures.

Sentences and details have the whole number, so that it can be copied.
"""

from __future__ import annotations

LONG = 12  # digits, from which nobody reads a number to its end
TAIL = 6  # digits that are shown of such a one; the dashboard shows as many (parts/who.js)


def short(node: str) -> str:
    """Return the last digits of a long number, «…474769»; any other name as it is."""
    return f"…{node[-TAIL:]}" if len(node) >= LONG and node.isascii() and node.isdigit() else node
