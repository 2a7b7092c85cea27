# SPDX-License-Identifier: Apache-2.0
"""The statistics on a GPU, without one: Triton's interpreter runs the kernels on the CPU. `test_gpu_sums` has the rest.

Whether Triton interprets is decided as it is imported, for the whole process: so there is one for it.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedvitals.kernels import device_backend, sums
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda import sums as device_sums
from support.paths import TESTS

CASES = ("sums.py", "updates.py")


@pytest.mark.thorough
def test_the_kernels_in_triton_s_interpreter():
    pytest.importorskip("triton", reason="triton is not installed: the kernels for GPUs cannot be interpreted")
    files = [str(TESTS / "support" / "interpreted" / name) for name in CASES]
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "-p", "no:xdist"]
    overflow = ["-W", "ignore::RuntimeWarning"]  # numpy's, on squares that are out of range on purpose
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, *overflow], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.thorough
def test_without_a_gpu_triton_is_not_imported():
    """Also where it is installed: CPU-only users pay nothing for it."""
    script = (
        "import sys, torch; from fedvitals.kernels import GradientRecorder, sums, device_backend\n"
        "import fedvitals.probes.stacked.session\n"
        "sums([torch.ones(3)]); sums([torch.ones(2, 3)], clients=True); GradientRecorder([torch.ones(2)])\n"
        "assert device_backend() is None\n"
        "assert 'triton' not in sys.modules and 'fedvitals.kernels.cuda.statistics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def test_a_ring_without_the_kernels_is_filled_by_torch(monkeypatch):
    monkeypatch.setattr(loading, "load_kernels", lambda: loading.LoadedKernels(None, "the test asks for it"))
    ring = device_sums.DeviceRing([3, 2], [True, False], 4, 3, "cpu")
    matrix = torch.arange(20.0).view(4, 5)
    ring.record(matrix, torch.tensor([7]))
    expected = np.asarray(sums([matrix[:, :3], None], clients=True))
    np.testing.assert_array_equal(ring.ring[1], expected)
    assert not ring.ring[[0, 2]].any()


def test_why_there_are_no_kernels_is_told(monkeypatch, caplog):
    monkeypatch.setenv("FEDVITALS_KERNEL", "torch")
    assert loading._load.__wrapped__() == loading.LoadedKernels(None, "FEDVITALS_KERNEL=torch asks for it")
    monkeypatch.delenv("FEDVITALS_KERNEL")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not installed" in loading._load.__wrapped__().reason
    assert "by torch, without the compiled kernel" in caplog.text
    if not torch.cuda.is_available():
        assert device_backend() is None
