# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels in this process with llvmlite, once, on first use.

It needs no compiler and no files: assembly text goes in, the address of a function comes out. Where that is not
possible (package missing or too old, executable memory forbidden), `load_kernel()` says why, and torch is used instead.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from fedvitals.kernels.cpu import statistics_ir
from fedvitals.stats import STATISTICS

_LOG = logging.getLogger("fedvitals.kernels")
_LOCK = threading.RLock()

OLDEST = (0, 45)  # versions before know pointers only with the type of what they point to


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel: `call(table, tensors, rows)` and the address of the function for every supported type."""

    call: Callable[[bytes | int, int, Any], None]  # the table and the rows as an object, or as an address
    call_at: Callable[[int], None]  # the same, its three arguments read from an address
    functions: Mapping[torch.dtype, int]
    sketches: Mapping[torch.dtype, Callable[[int, int, int, int, int, int], None]]  # see `sketch_ir`
    nothing: tuple[int, int, int]  # the table line of a tensor that is not there
    engine: Any  # owns the machine code: must live as long as `call`


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """The kernel of this process, or None with the reason."""

    kernel: Kernel | None
    reason: str


@cache
def load_kernel() -> LoadedKernel:
    """Return the kernel of this process, or why there is none. Decided on the first call."""
    with _LOCK:  # a second thread waits here and then gets what the first one made
        return _load()


@cache
def _load() -> LoadedKernel:
    _wait_at_fork()
    wish = os.environ.get("FEDVITALS_KERNEL", "")
    if wish == "torch":
        return _fall_back("FEDVITALS_KERNEL=torch asks for it", logging.INFO)
    if wish not in ("", "llvm"):
        _LOG.warning("FEDVITALS_KERNEL='%s' is ignored: it can be 'torch' or 'llvm'.", wish)
    try:
        import llvmlite  # noqa: PLC0415 - 35 ms that only those pay who measure
    except ImportError:
        return _fall_back("llvmlite is not installed (pip install 'fedvitals[kernel]')", logging.WARNING)
    version = llvmlite.__version__
    begin = time.perf_counter()
    try:
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            return _fall_back(f"llvmlite {version} is too old ({needed} or newer is needed)", logging.WARNING)
        if not _may_execute():
            return _fall_back("this system forbids making memory executable", logging.WARNING)
        kernel = compile_kernel()
        _check(kernel)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a compiler, training must go on
        first_line = (str(error) or repr(error)).splitlines()[0]
        return _fall_back(f"llvmlite {version} could not compile it ({first_line})", logging.WARNING)
    milliseconds = 1000 * (time.perf_counter() - begin)
    return LoadedKernel(kernel, f"compiled by llvmlite {version} in {milliseconds:.0f} ms")


def compile_kernel(cpu: str | None = None, features: str | None = None) -> Kernel:
    """Compile the kernel for this processor, or for a named older one."""
    import llvmlite.binding as llvm  # noqa: PLC0415 - as above

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu = cpu or llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten() if features is None else features
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=2, jit=True)
    kinds = [kind for kind in statistics_ir.KINDS.values() if kind.memory != "half" or _reads_half(features)]
    parsed = llvm.parse_assembly(statistics_ir.module(vector_shape(features), kinds))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    # PYFUNCTYPE keeps the interpreter's lock during the call: giving it up and waiting to get it back costs more
    # than reading a whole model does.
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    functions = {getattr(torch, kind.name): engine.get_function_address(f"tensor_{kind.name}") for kind in kinds}
    call = prototype(engine.get_function_address("sums"))
    call_at = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("sums_at"))
    # A large update takes milliseconds: other threads may run meanwhile (CFUNCTYPE gives up the interpreter's lock).
    sketching = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p])
    sketches = {
        getattr(torch, kind): sketching(engine.get_function_address(f"sketch_{kind}"))
        for kind in ("float32", "float64")
    }
    return Kernel(call, call_at, functions, sketches, (functions[torch.float32], 0, 0), engine)


def vector_shape(features: str) -> statistics_ir.VectorShape:
    """Return the shape of the code for a processor with these features (LLVM's spelling: `+avx2,-avx512f`)."""
    has = set(features.split(","))
    if "+avx512f" in has:
        return statistics_ir.VectorShape(vector_bytes=64, unroll=2)
    if "+avx2" in has:
        return statistics_ir.VectorShape(vector_bytes=32, unroll=2)
    # SSE2 has 16 registers of 16 bytes; NEON has 32, so that four sets of accumulators fit.
    return statistics_ir.VectorShape(vector_bytes=16, unroll=2 if _is_x86() else 4)


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


def _reads_half(features: str) -> bool:
    """Return whether float16 is supported. Without the instruction LLVM would call a function that may be missing."""
    return "+f16c" in features.split(",") or not _is_x86()


def _may_execute() -> bool:
    """Return whether written memory may become executable: LLVM does not check, and the first call would crash."""
    if os.name != "posix":
        return True
    page = mmap.mmap(-1, mmap.PAGESIZE)
    view = ctypes.c_char.from_buffer(page)
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failed = mprotect(ctypes.addressof(view), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    del view  # the page cannot be closed while something points into it
    page.close()
    return not failed


def _check(kernel: Kernel) -> None:
    """Raise unless the kernel's results on known values are right; some processors never get another test."""
    values = np.arange(-3, 300, dtype=np.float32)
    values[7] = np.nan
    rest = np.delete(values, 7).astype(np.float64)
    expected = [303, rest.sum(), (rest**2).sum(), np.abs(rest).sum(), -3, 299, 1, 1, 0]
    rows = (ctypes.c_double * len(STATISTICS))()
    line = np.array([kernel.functions[torch.float32], values.ctypes.data, values.size])
    kernel.call(line.tobytes(), 1, rows)
    if list(rows) != expected:
        raise RuntimeError(f"on known values it returned {list(rows)} instead of {expected}")


def _fall_back(reason: str, level: int) -> LoadedKernel:
    _LOG.log(level, "Statistics are computed by torch, without the compiled kernel: %s.", reason)
    return LoadedKernel(None, reason)


def _wait_at_fork() -> None:
    """Make forks wait for a compilation in another thread, or the child would find the lock taken forever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
