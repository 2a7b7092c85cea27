# SPDX-License-Identifier: Apache-2.0
"""Distributions with entry points, written as an installer would leave them."""

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, module: str, code: str, *, verbs: Mapping[str, str] = {}, detectors: Mapping[str, str] = {}
) -> None:
    """Write a module and the metadata of its distribution, called like it, into a folder that is on `sys.path`.

    `verbs` and `detectors`: what the module offers, as name → attribute.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    groups = {"fedvitals.verbs": verbs, "fedvitals.detectors": detectors}
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[{group}]", *(f"{name} = {module}:{attribute}" for name, attribute in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
