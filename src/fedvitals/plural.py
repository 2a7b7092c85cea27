# SPDX-License-Identifier: Apache-2.0
"""Numbers with their noun in words."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: «1 client», «3 clients»."""
    return f"{count} {noun}{'s' * (count != 1)}"
