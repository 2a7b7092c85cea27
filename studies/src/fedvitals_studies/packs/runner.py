# SPDX-License-Identifier: Apache-2.0
"""The `run.py` of a pack (`gpu_pack`): reassembles the data, then calls the trial. Standard library only."""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def joined(folder: Path, files: list[dict[str, Any]]) -> Path:
    """Return the reassembled data files; existing ones are reused."""
    target = folder / "joined"
    target.mkdir(exist_ok=True)
    for file in files:
        path = target / file["name"]
        if path.exists() and _digest(path.read_bytes()) == file["sha256"]:  # otherwise from an earlier pack
            continue
        missing = [piece for piece in file["pieces"] if not (folder / piece).exists()]
        if missing:
            sys.exit(f"{file['name']} is not complete: {', '.join(missing)} has not arrived in {folder}.")
        content = b"".join((folder / piece).read_bytes() for piece in file["pieces"])
        if _digest(content) != file["sha256"]:
            sys.exit(f"{file['name']} was damaged on its way: its checksum differs. Carry its parts again.")
        half = path.with_suffix(".half")
        half.write_bytes(content)
        half.replace(path)
    return target


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    code = Path(__file__).resolve().parent
    manifest = json.loads((code / "manifest.json").read_text(encoding="utf-8"))
    os.environ.setdefault("FEDVITALS_COMMIT", manifest["commit"])
    if manifest["files"]:
        os.environ["FEDVITALS_DATA"] = str(joined(code.parent, manifest["files"]))
    sys.path.insert(0, str(code))
    module, _, function = manifest["entry"].partition(":")
    try:
        code_of_exit = getattr(importlib.import_module(module), function)(sys.argv[1:])
    except ImportError as error:  # compiled code is for one version of Python
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if here == manifest["python"]:
            raise
        sys.exit(
            f"{error}. This pack is for Python {manifest['python']}, and this is {here}: run it with the other one, or "
            f"pack it again with --python {here}."
        )
    sys.exit(code_of_exit)


if __name__ == "__main__":
    main()
