# SPDX-License-Identifier: Apache-2.0
"""When the kernel cannot be compiled torch takes over and says why; compiling is safe among threads and forks."""

import logging
import os
import subprocess
import sys
import threading
import types

import pytest
import torch

from fedvitals import kernels
from fedvitals.kernels.cpu import jit

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

# What makes the kernel impossible, and the reason that must be given; each in a process where nothing is compiled yet.
SCRIPTS = {
    "FEDVITALS_KERNEL=torch asks for it": "import os; os.environ['FEDVITALS_KERNEL'] = 'torch'",
    "llvmlite is not installed (pip install 'fedvitals[kernel]')": "import sys; sys.modules['llvmlite'] = None",
    "this system forbids making memory executable": (
        "import ctypes, sys\n"
        "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit(77)"  # PR_SET_MDWE: no page becomes executable
    ),
}
MEASURE = """
import logging; logging.basicConfig(level="INFO")
import torch; from fedvitals.kernels import backend, sums
assert sums([torch.arange(100.0)])[0, 1] == 4950
print(backend())
"""


@pytest.mark.parametrize("reason", SCRIPTS)
def test_without_the_kernel_torch_takes_over_and_says_why(reason):
    if "executable" in reason and sys.platform != "linux":
        pytest.skip("only Linux can be asked to forbid executable memory")
    script = [sys.executable, "-c", SCRIPTS[reason] + MEASURE]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    if result.returncode == 77:
        pytest.skip("this Linux cannot forbid executable memory (needs 6.3)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"torch ({reason})"
    assert result.stderr.count("fedvitals.kernels:") == 1
    assert reason in result.stderr


@pytest.mark.parametrize(("version", "reason"), [("0.44.0", "too old"), ("0.99", "could not compile it")])
def test_an_unfit_llvmlite_is_left_alone(monkeypatch, caplog, version, reason):
    monkeypatch.setitem(sys.modules, "llvmlite", types.SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with caplog.at_level(logging.INFO, "fedvitals.kernels"):
        loaded = jit._load.__wrapped__()
    assert loaded.kernel is None
    assert reason in loaded.reason
    assert len(caplog.records) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_measures_too():
    expected = kernels.sums([torch.arange(10_000.0)])
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if (kernels.sums([torch.arange(10_000.0)]) == expected).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def nothing_loaded_yet():
    for function in (jit.load_kernel, jit._load):
        function.cache_clear()
    yield
    for function in (jit.load_kernel, jit._load):
        function.cache_clear()


def test_threads_that_start_together_compile_once(monkeypatch, nothing_loaded_yet):
    reasons, start = [], threading.Barrier(4)
    monkeypatch.setattr(jit, "_fall_back", lambda reason, _: reasons.append(reason) or jit.LoadedKernel(None, reason))
    monkeypatch.setenv("FEDVITALS_KERNEL", "torch")

    def load():
        start.wait()
        jit.load_kernel()

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reasons) == 1
