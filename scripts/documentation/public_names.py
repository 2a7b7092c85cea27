# SPDX-License-Identifier: Apache-2.0
"""The public interface, with signatures and docstrings.

It consists of every name that `import fedvitals as fv` shows, of `fedvitals.testing`, and of the methods of objects
that these names return, whose classes are never called by users.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import fedvitals as fv
import fedvitals.testing
from fedvitals.diagnosis.live_detectors import FindingList
from fedvitals.monitor.loop_corrections import LoopCorrections
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.notebook import Runs, StoredRun

WIDTH = 120
RETURNED = {
    Runs: "`fv.open`",
    StoredRun: '`fv.open(...)["name"]`',
    FindingList: "`fv.Monitor.findings`",
    LoopCorrections: "`fv.Monitor.corrections`",
    WorkerObserver: "`monitor.host.for_worker`",
}  # classes, and what returns their objects


@dataclass(frozen=True)
class PublicName:
    """A public name: its path, its line in the golden list, what it stands for, and whether that is a «class», ...

    An «object» is of a class that users do not call: what it offers counts, and not how it is made.
    """

    path: str
    signature: str
    public: Any
    kind: str


class Verbatim:
    """Text that a signature shows as it is, without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def shown_default(default: Any) -> Any:
    """A default value without its address in memory."""
    if default is inspect.Parameter.empty or not (inspect.isroutine(default) or inspect.isclass(default)):
        return default
    return Verbatim(default.__name__)


def as_written(annotation: Any) -> Any:
    """An annotation as it stands in the source, without quotes and without checks."""
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return Verbatim(annotation) if isinstance(annotation, str) else annotation


def signature(name: str, function: Any, *, is_method: bool = False) -> str:
    """A name with its parameters, without `self`; one parameter a line where they do not fit in one."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=as_written(parameter.annotation), default=shown_default(parameter.default))
        for parameter in list(found.parameters.values())[is_method:]
    ]
    returned = inspect.Signature.empty if inspect.isclass(function) else as_written(found.return_annotation)
    whole = found.replace(parameters=parameters, return_annotation=returned)
    if len(f"{name}{whole}") <= WIDTH:
        return f"{name}{whole}"
    kinds = [parameter.kind for parameter in parameters]
    rows = [str(parameter) for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        rows.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = str(whole.replace(parameters=[])).removeprefix("()")
    return "\n".join([f"{name}(", *(f"    {row}," for row in rows), f"){result}"])


def constructor(name: str, kind: type) -> str:
    has_signature = not issubclass(kind, BaseException) or inspect.isfunction(kind.__init__)
    return signature(name, kind) if has_signature else f"{name}(message)"


def members(path: str, kind: type) -> Iterator[PublicName]:
    """The public methods and properties of a class, except those of bases that are not ours.

    A method that overrides one of these, such as a trainer's `on_step_end`, is called and documented by their package.
    """
    ours = [owner for owner in kind.__mro__ if owner.__module__.startswith("fedvitals")]
    theirs = {attribute for owner in {*kind.__mro__} - {*ours} for attribute in vars(owner)}
    for attribute in sorted({attribute for owner in ours for attribute in vars(owner)} - theirs):
        member, name = inspect.getattr_static(kind, attribute), f"{path}.{attribute}"
        if attribute.startswith("_"):
            continue
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            shown = f"{name}: {inspect.signature(getter).return_annotation}"
            yield PublicName(name, shown, getter, "property")
        elif isinstance(member, staticmethod | classmethod):
            yield PublicName(name, signature(name, getattr(kind, attribute)), getattr(kind, attribute), "function")
        elif inspect.isfunction(member):
            yield PublicName(name, signature(name, member, is_method=True), member, "method")


def names_in(module: ModuleType) -> list[str]:
    """The names that a module offers, without what it imports for itself."""
    if hasattr(module, "__all__"):
        return sorted(name for name in module.__all__ if not name.startswith("_"))
    return [
        name
        for name in sorted({*dir(module)})
        if not name.startswith("_") and getattr(getattr(module, name), "__module__", "").startswith("fedvitals")
    ]


def public_names() -> Iterator[PublicName]:
    """Yield every public name; a second name of the same thing is an «alias»."""
    seen: dict[int, str] = {}
    yield from names_below("fv", fv, seen)
    yield from names_below("fedvitals.testing", fedvitals.testing, seen)
    for kind in RETURNED:
        yield PublicName(kind.__name__, f"{kind.__name__}: object", kind, "object")
        yield from members(kind.__name__, kind)


def names_below(path: str, module: ModuleType, seen: dict[int, str]) -> Iterator[PublicName]:
    """Yield the public names of a module and of what is in it; `seen` are those of before, by their identity."""
    for name in names_in(module):
        public, shown = getattr(module, name), f"{path}.{name}"
        if id(public) in seen:
            yield PublicName(shown, f"{shown} = {seen[id(public)]}", public, "alias")
            continue
        seen[id(public)] = shown
        if isinstance(public, ModuleType):
            yield PublicName(shown, f"{shown}: module", public, "module")
            yield from names_below(shown, public, seen)
        elif inspect.isclass(public):
            is_protocol = getattr(public, "_is_protocol", False)
            yield PublicName(
                shown,
                f"{shown}: protocol" if is_protocol else constructor(shown, public),
                public,
                "object" if is_protocol else "class",
            )
            if path != "fv.lab":  # of the lab's parts people write the constructor; the lab calls the rest
                yield from members(shown, public)
        elif callable(public):
            yield PublicName(shown, signature(shown, public), public, "function")
        else:
            yield PublicName(shown, f"{shown}: {type(public).__name__}", public, "value")
