# SPDX-License-Identifier: Apache-2.0
"""What a stack does on CUDA, step by step on this processor: Triton's interpreter in place of its compiler, and work
that is done at once in place of captured graphs. On a GPU, `lab/stacked/test_gpu_engine.py` does the same for real.
"""

import os
import subprocess
import sys

import pytest

from support.paths import TESTS

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted here")


@pytest.mark.thorough
def test_in_an_interpreter():
    """In a process of its own: Triton reads its environment when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "support" / "interpreted" / "stacked_clients.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
