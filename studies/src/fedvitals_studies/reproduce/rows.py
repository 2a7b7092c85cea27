# SPDX-License-Identifier: Apache-2.0
"""Runs of a small study as JSON rows, rewritten after each run so that it can be stopped and continued."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

Wanted = TypeVar("Wanted", bound=tuple[Hashable, ...])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it does not exist."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return rows


def go_on(
    path: Path, wanted: Iterable[Wanted], run: Callable[..., dict[str, Any]], minutes: float
) -> list[dict[str, Any]]:
    """Run what is wanted, begin nothing after `minutes`, and return all rows of the file."""
    torch.set_num_threads(1)
    rows, end = read(path), time.monotonic() + 60 * minutes
    for each in wanted:
        if time.monotonic() > end:
            break
        rows.append(run(*each))
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(" " + json.dumps(row) for row in rows)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(rows[-1], flush=True)  # noqa: T201 - a study that is run by hand
    return rows


def options(description: str, **numbers: int) -> argparse.ArgumentParser:
    """Return the options of such a study: its folder, the time limit, and the given numbers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser
