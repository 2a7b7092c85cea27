# SPDX-License-Identifier: Apache-2.0
"""The oldest Flower that we support, in a process of its own: all tests that need no other processes, once more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import TESTS

OLDEST = Path(os.environ.get("FEDVITALS_OLDEST_FLWR") or Path(sys.prefix) / "flwr-oldest")
VERSION = "1.21.0"
ALIKE = (
    "corrections",
    "failures",
    "guard",
    "legacy",
    "mixed",
    "privacy",
    "replay/client",
    "replay/records",
    "replay/server",
    "reply_envelope",
    "secagg",
    "strategies",
    "watch",
)
SAYING = "import flwr, importlib.metadata as m; print(m.version('flwr'), flwr.__file__)"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not (OLDEST / "flwr").is_dir(), reason=f"no flwr {VERSION} in {OLDEST}"),
]


def test_file(name):
    """The file of tests by its name in `ALIKE`, which may have a folder before it."""
    folder, _, own = name.rpartition("/")
    return TESTS / "hosts" / "flower" / folder / f"test_{own}.py"


test_file.__test__ = False


def run(*arguments, timeout):
    """Python, with the oldest Flower before all others."""
    path = os.pathsep.join([str(OLDEST), os.environ.get("PYTHONPATH", "")])
    command, env = [sys.executable, "-W", "ignore", *arguments], {**os.environ, "PYTHONPATH": path}
    told = {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, check=False, env=env, cwd=TESTS.parent, **told)


def test_it_is_the_oldest_that_is_there():
    version, file = run("-c", SAYING, timeout=60).stdout.strip().split(maxsplit=1)
    assert version == VERSION
    assert Path(file).is_relative_to(OLDEST)


def test_all_that_works_with_the_newest_works_with_the_oldest():
    files = [str(test_file(name)) for name in ALIKE]
    done = run("-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", *files, timeout=540)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
