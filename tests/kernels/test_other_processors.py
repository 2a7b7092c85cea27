# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel for processors that are not here: compiled to assembly by llvmlite, which is then looked at."""

import re

import llvmlite.binding as llvm
import pytest

from fedvitals.kernels.cpu import jit, statistics_ir

KINDS = list(statistics_ir.KINDS.values())


@pytest.fixture(scope="module", params=["aarch64-unknown-linux-gnu", "aarch64-pc-windows-msvc", "arm64-apple-darwin"])
def assembly(request, module_monkeypatch) -> tuple[str, str]:
    """The triple, and the kernel's assembly for it: with the shape that jit.py chooses on such a machine."""
    module_monkeypatch.setattr(jit.platform, "machine", lambda: "aarch64")
    shape = jit.vector_shape("+neon,+fp-armv8")
    assert shape == statistics_ir.VectorShape(vector_bytes=16, unroll=4)
    assert jit._reads_half("")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(request.param).create_target_machine(opt=2)
    module = llvm.parse_assembly(statistics_ir.module(shape, KINDS))
    module.triple = request.param
    module.verify()
    return request.param, machine.emit_assembly(module)


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_function_is_there(assembly):
    _, text = assembly
    defined = {name.lstrip("_") for name in re.findall(r"^(\w+):", text, re.MULTILINE)}
    wanted = {f"{part}_{kind.name}" for part in ("tensor", "fast", "exact") for kind in KINDS}
    assert wanted | {"sums", "sums_at", "sketch_float32", "sketch_float64"} <= defined


def test_nothing_is_called_that_a_process_may_not_have(assembly):
    """A call of a function of the compiler's library (such as `__extendhfsf2`) would end the process."""
    _, text = assembly
    called = {name.lstrip("_") for name in re.findall(r"^\s+(?:bl|b)\s+(_?[a-z]\w+)", text, re.MULTILINE)}
    defined = {name.lstrip("_") for name in re.findall(r"^(\w+):", text, re.MULTILINE)}
    assert called <= defined


def test_loops_use_vectors(assembly):
    triple, text = assembly
    # Apple writes «fmla.2d v0, v1, v2», the others «fmla v0.2d, v1.2d, v2.2d».
    pattern = r"^\s+(f\w+)\.(?:2d|4s)\s" if "apple" in triple else r"^\s+(f\w+)\s+v\d+\.(?:2d|4s)"
    used = set(re.findall(pattern, text, re.MULTILINE))
    assert {"fadd", "fabs", "fminnm", "fmaxnm"} <= used, used
    assert {"fmla"} & used or {"fmul"} & used
    assert not re.search(r"\b[xyz]mm\d", text)
