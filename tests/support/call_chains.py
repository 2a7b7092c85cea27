# SPDX-License-Identifier: Apache-2.0
"""Which functions of fedvitals lie between an entry point and a target function, traced while both run."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def chains(action: Callable[[], Any], targets: set[CodeType]) -> list[tuple[str, ...]]:
    """Run `action` and return, for each call of a target on this thread, the fedvitals functions from the first to it.

    A function is named `module:qualified name`, without the package. Generator expressions, lambdas and nested
    functions count as the function that contains them.
    """
    seen: dict[tuple[str, ...], None] = {}

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in targets:
            seen[_chain(frame)] = None

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        action()
    finally:
        sys.setprofile(before)
    return list(seen)


def _chain(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("fedvitals."):
            function = frame.f_code.co_qualname.partition(".<")[0]
            name = f"{module.removeprefix('fedvitals.')}:{function}"
            if not names or names[-1] != name:
                names.append(name)
        frame = frame.f_back
    return tuple(reversed(names))
