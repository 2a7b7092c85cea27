# SPDX-License-Identifier: Apache-2.0
"""Conditions on all members of a collection that must not be empty."""

from collections.abc import Iterable


def holds_for_each(conditions: Iterable[object]) -> bool:
    """Return whether all conditions are true; fails the test if there are none, since nothing would be checked."""
    results = [bool(condition) for condition in conditions]
    assert results, "there is nothing to check: the collection is empty"
    return all(results)
