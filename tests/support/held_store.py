# SPDX-License-Identifier: Apache-2.0
"""A process that holds the lock of a store, as a training does."""

import contextlib
import subprocess
import sys

CODE = """
import sys
from pathlib import Path
from fedvitals.store.lock import WriterLock
WriterLock(Path(sys.argv[1])).hold()
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(store):
    """Hold the lock of a store by another process, which is yielded."""
    command = [sys.executable, "-c", CODE, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
