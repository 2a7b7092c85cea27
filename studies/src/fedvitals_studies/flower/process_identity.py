# SPDX-License-Identifier: Apache-2.0
"""Creates Flower messages without Flower's processes: in newer versions, a message belongs to its process's run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def flower_run(run_id: int = 7) -> Iterator[None]:
    """Allow messages to be created inside the block: in newer versions they belong to a process's run."""
    try:
        from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415
    except ImportError:  # unknown to the oldest versions
        yield
        return
    before: dict[str, Any] = {name: getattr(TaskIdentity, name) for name in ("_run_id", "_node_id", "_task_id")}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, 1, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
