# SPDX-License-Identifier: Apache-2.0
"""The reference of the public names, as pages of Markdown made from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from documentation.docstrings import Docstring, docstring_of, parameters_of
from documentation.public_names import RETURNED, PublicName, public_names, shown_default
from fedvitals.lab.faults.fault import Fault

PLACES = "fv.errors", "fv.lab", "fv.plot", "fv.probes", "fv.sinks", "fedvitals.testing"
HOSTS = "fv.flower", "fv.huggingface", "fv.lightning", "fv.nvflare"
TITLES = {
    "reference/index.md": "fedvitals",
    "reference/monitor.md": "fv.Monitor",
    "reference/plot.md": "fv.plot",
    "reference/probes.md": "fv.probes",
    "reference/sinks.md": "fv.sinks",
    "reference/hosts.md": "Hosts: Flower, NVFlare, Hugging Face, Lightning",
    "reference/lab.md": "fv.lab",
    "reference/faults.md": "fv.lab: faults",
    "reference/errors.md": "fv.errors",
    "reference/returned.md": "Objects that fedvitals returns",
    "reference/testing.md": "fedvitals.testing",
}
ABOUT = {
    "reference/index.md": "The names that `import fedvitals as fv` offers. They load on first use: `import fedvitals` "
    "itself loads neither torch nor any extra. Some return objects with methods of their own: "
    "[these](returned.md) are public as well. Everything else may change without notice.",
    "reference/returned.md": "You do not create these objects yourself; the public names return them. What a host of "
    "your own calls on `monitor.host` is explained on a page of its own: [hosts](../hosts.md).",
    "reference/testing.md": "`import fedvitals.testing`: for tests of your own. Each check returns if your probe, "
    "sink, detector, topology or [host](../hosts.md) fulfils its contract. It needs the extra `lab`, and no test "
    "framework.",
    "reference/lab.md": "The parts of a simulated federation. Each kind has two names, that of its class "
    "(`lab.LabelNoise`) and that in TOML (`lab.label_noise`). How they fit together: [the lab](../lab.md).",
    "reference/faults.md": "Faults that can be planted in a federation of the lab. All of them take `nodes`, `since`, "
    "`until`, `every` and `ramp`, which are explained once, at the end of this page.",
}
SHARED = ("nodes", "since", "until", "every", "ramp")


def pages() -> dict[str, str]:
    """Return the pages of the reference: their Markdown by their path in the site's sources."""
    grouped: dict[str, list[PublicName]] = {page: [] for page in TITLES}
    for name in public_names():
        if name.kind != "alias":
            grouped[_page_of(name)].append(name)
    return {page: "\n".join(_page(page, names)) for page, names in grouped.items()}


def _page_of(name: PublicName) -> str:
    parts = name.path.split(".")
    if parts[0] in _returned():
        return "reference/returned.md"
    place = ".".join(parts[:2])
    if inspect.isclass(name.public) and issubclass(name.public, Fault):
        return "reference/faults.md"
    if place in PLACES:
        return f"reference/{parts[1]}.md"
    if place in HOSTS:
        return "reference/hosts.md"
    return "reference/monitor.md" if place == "fv.Monitor" else "reference/index.md"


def _page(page: str, names: list[PublicName]) -> Iterator[str]:
    yield f"# {TITLES[page]}\n"
    if page in ABOUT:
        yield f"{ABOUT[page]}\n"
    if page == "reference/index.md":
        yield from _contents(names)
    for name in names:
        yield from _entry(name, page)
    if page == "reference/faults.md":
        yield "## What all faults take\n"
        yield from _arguments(Fault, docstring_of(Fault), only=SHARED)


def _contents(names: list[PublicName]) -> Iterator[str]:
    yield "| name | what it is |"
    yield "| --- | --- |"
    rows = {name.path: _summary(name) for name in names if name.kind != "module" and name.path.count(".") == 1}
    links = {path: f"#{_anchor(path)}" for path in rows}
    for page, title in TITLES.items():
        if title.startswith("fv.") and ":" not in title:
            links[title] = page.removeprefix("reference/")
    rows["fv.Monitor"] = "The monitor of one run."
    links["fedvitals.testing"] = "testing.md"
    rows |= {name.path: _summary(name) for name in names if name.kind == "module"}
    rows["fedvitals.testing"] = "For tests of your own: a sink in memory, tiny federations, and checks of plug-ins."
    rows |= {f"fv.{place}": about for place, about in _modules().items()}
    for path in sorted(rows):
        link = links.get(path, "hosts.md")
        yield f"| [`{path}`]({link}) | {rows[path]} |"
    yield ""


def _modules() -> dict[str, str]:
    return {
        "errors": "The errors that fedvitals raises on purpose.",
        "flower": "Attach to a Flower app.",
        "huggingface": "A callback for Hugging Face's Trainer.",
        "lab": "Simulate a federation, with faults that you choose.",
        "lightning": "A callback for Lightning's Trainer.",
        "nvflare": "Attach to an NVFlare recipe or job.",
        "plot": "Pictures of runs, as matplotlib figures.",
        "probes": "Measurements of a model at a moment of its training.",
        "sinks": "Send records to other tools while a run trains.",
    }


def _returned() -> dict[str, str]:
    """Return what returns the objects of each class that users do not call, by the class's name."""
    return {kind.__name__: source for kind, source in RETURNED.items()}


def _summary(name: PublicName) -> str:
    return " ".join(docstring_of(name.public).text.split("\n\n")[0].split())


def _anchor(path: str) -> str:
    return re.sub(r"[^\w-]", "", path.lower())


def _entry(name: PublicName, page: str) -> Iterator[str]:
    if name.kind in ("module", "value"):
        return
    docstring = docstring_of(name.public)
    returned = _returned()
    is_returned = name.path.split(".")[0] in returned
    is_member = name.path.count(".") > (0 if is_returned else 1 + name.path.startswith((*PLACES, *HOSTS)))
    yield f"{'###' if is_member else '##'} `{name.path}`\n"
    if name.kind == "object":
        yield f"Returned by {returned[name.path]}.\n" if is_returned else ""
    else:
        yield f"~~~python\n{name.signature}\n~~~\n"
    yield f"{docstring.text}\n"
    if name.kind not in ("property", "object"):
        left_out = SHARED if page == "reference/faults.md" else ()
        yield from _arguments(name.public, docstring, without=left_out)
    if docstring.returns:
        yield f"**Returns**: {docstring.returns}\n"
    for error, when in docstring.raises.items():
        yield f"**Raises** `{error}`: {when}\n"


def _arguments(
    public: Any, docstring: Docstring, only: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Iterator[str]:
    rows = [
        f"| `{parameter.name}` | {_cell(_default(parameter))} | {_cell(docstring.arguments.get(parameter.name, ''))} |"
        for parameter in parameters_of(public)
        if (not only or parameter.name in only) and parameter.name not in without
    ]
    if rows:
        yield "| parameter | default | meaning |"
        yield "| --- | --- | --- |"
        yield "\n".join([*rows, ""])


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    text = str(shown_default(parameter.default)) if not isinstance(parameter.default, str) else repr(parameter.default)
    return f"`{text}`" if len(text) < 40 else "…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
