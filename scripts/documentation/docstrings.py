# SPDX-License-Identifier: Apache-2.0
"""Docstrings with sections, as the public names have them: a summary, «Args:», «Returns:» or «Yields:», «Raises:»."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

SECTIONS = ("Args", "Returns", "Yields", "Raises")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^    \*{0,2}(\w+): (.*)$")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring in its parts: text, what each parameter means, what comes out, what is raised and when."""

    text: str = ""
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = dataclasses.field(default_factory=dict)


def parse(docstring: str | None) -> Docstring:
    """Return a docstring's parts.

    Args:
        docstring: As `__doc__` has it; None counts as empty.
    """
    text, *rest = _SECTION.split(inspect.cleandoc(docstring or ""))
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    returned = sections.get("Returns", sections.get("Yields", ""))
    return Docstring(
        text.strip(), _pairs(sections.get("Args", "")), inspect.cleandoc(returned), _pairs(sections.get("Raises", ""))
    )


def _pairs(section: str) -> dict[str, str]:
    """Return the lines «name: meaning» of a section; lines that are indented deeper go on with the one before."""
    meanings: dict[str, str] = {}
    name = None
    for line in section.splitlines():
        if match := _ARGUMENT.match(line):
            name = match[1]
            meanings[name] = match[2].strip()
        elif name and line.strip():
            meanings[name] = f"{meanings[name]} {line.strip()}"
    return meanings


def docstring_of(public: Any) -> Docstring:
    """Return the parts of a public object's docstring.

    A class explains the parameters of its constructor in its own docstring; fields that it inherits may be explained
    by the class that declares them.

    Args:
        public: A class, a function or a method.
    """
    if not inspect.isclass(public):
        return parse(inspect.getdoc(public))
    own, arguments = parse(public.__dict__.get("__doc__")), {}
    for owner in reversed(public.__mro__):
        if owner.__module__.startswith("fedvitals"):
            arguments |= parse(owner.__dict__.get("__doc__")).arguments
    return dataclasses.replace(own, arguments=arguments)


def parameters_of(public: Any) -> list[inspect.Parameter]:
    """Return the parameters that a caller may pass: those of a constructor for a class, without `self`."""
    if inspect.isclass(public) and issubclass(public, BaseException) and not inspect.isfunction(public.__init__):
        return []
    found = list(inspect.signature(public).parameters.values())
    return [parameter for parameter in found if parameter.name != "self"]
