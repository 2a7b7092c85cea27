# SPDX-License-Identifier: Apache-2.0
"""Several processes on one GPU at the same time, by NVIDIA's own service (MPS), if it is available and works.

Without it the GPU runs processes in turns, and one process with small kernels leaves most of it idle in its turn. The
service is ours alone: its sockets are in our own folder, and it ends with us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin")
PATIENCE = 60.0  # seconds for the first process to reach the GPU
TRY = "import torch; print(float(torch.ones(8, device='cuda').sum()))"
VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextlib.contextmanager
def shared(wanted: bool = True) -> Iterator[bool]:
    """Let processes started inside the block share the GPU; yields whether they do. Raises nothing if they cannot."""
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))
    if not wanted or control is None:
        yield False
        return
    before = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        for name in VARIABLES:
            os.environ[name] = str(Path(folder) / name.lower())
            Path(os.environ[name]).mkdir()
        begun = True
        try:
            begun = _begun(control)
            if not begun:
                _end(control)
                _put_back(before)
            yield begun
        finally:
            if begun:
                _end(control)
            _put_back(before)


def _begun(control: str) -> bool:
    try:
        subprocess.run([control, "-d"], check=True, capture_output=True, timeout=PATIENCE)  # noqa: S603 - our own words
        tried = subprocess.run(  # noqa: S603
            [sys.executable, "-c", TRY], check=False, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode == 0 and tried.stdout.strip() == "8.0"


def _end(control: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = "quit -t 5\n"  # remaining clients get five seconds
        subprocess.run([control], check=False, input=words, text=True, capture_output=True, timeout=20)  # noqa: S603


def _put_back(before: Mapping[str, str]) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(before)
