# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one thread of arithmetic, the same examples in CI each time, and no thread left behind."""

import gc
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.dashboard_server import chromium, page  # noqa: F401 - fixtures
from support.waiting import wait_until

# Before torch is loaded, and without loading it: numbers do not depend on the machine's cores, workers do not fight.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: tests of Ctrl-C would never end
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEAVING = 30.0  # seconds that a thread may take to end on a busy machine after it was told to

settings.register_profile("here", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)  # scripts/test --fast
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose every test is left out by its mark is not loaded: what such files import takes seconds."""
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if " and ".join(f"not {name}" for name in left_out) != config.option.markexpr or collection_path.suffix != ".py":
        return None
    marked = re.search(
        r"^pytestmark = (\[.*?\]$|.*?$)", collection_path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    named = re.findall(r"pytest\.mark\.(\w+)", marked[1]) if marked else []
    return True if {*named} & {*left_out} else None


def pytest_collection() -> None:
    """Collect no garbage while modules are loaded: each pass would walk over everything that they define."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what the loaded modules define out of later garbage collections, and let these be rarer.

    Some of them are explicit: strategies of Flower collect garbage for each reply.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is costly to make and only read: one per worker."""
    return tmp_path_factory.mktemp("session")


def _left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fedvitals-")]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Whoever starts a worker ends it: a monitor or queue that a test leaves open fails that test."""
    before = set(_left())
    yield
    if set(_left()) - before:
        wait_until(lambda: not set(_left()) - before, LEAVING, f"the end of {', '.join({*_left()} - before)}")
