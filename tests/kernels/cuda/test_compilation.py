# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs compile for one, on a machine without: what Triton's interpreter accepts, its compiler may not.

In a process of its own, since importing Triton is something that a process without a GPU must not do.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedvitals.kernels.cuda import sketch, statistics, update_statistics

def compiled(kernel, types, **constants):
    names = kernel.arg_names
    assert [*types, *constants] == names, names
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

NAMES = ("addresses", "before", "initial", "items", "first", "count", "chunk", "first_row", "changes", "partials",
         "squares", "sketches")
for dtype, pointer in ((tl.bfloat16, "*bf16"), (tl.float32, "*fp32")):
    kinds = ("*i64", pointer, "*fp32", "*i64", "i32", "i32", "i32", "i64", "*fp32", "*fp64", "*fp64", "*fp64")
    for asked in (True, False):
        options = dict.fromkeys(("SKETCH", "WEIGH", "DRIFT", "DRIFT_SKETCH", "KEEP"), asked)
        assert compiled(update_statistics.measure_items, dict(zip(NAMES, kinds)), DTYPE=dtype, **options)
kinds = {"addresses": "*i64", "stride": "i32", "items": "*i64", "offset": "i32", "count": "i32", "chunk": "i32",
         "partials": "*fp64"}
assert compiled(statistics.partials_of, kinds, LISTED=True, DTYPE=tl.bfloat16, SIZE=2, THREADS=128)
kinds = {"vectors": "*fp32", "stride": "i32", "length": "i32", "first_row": "i64", "each": "i32", "partial": "*fp64"}
assert compiled(sketch.sketch_parts, kinds)
"""


@pytest.mark.thorough
def test_the_kernels_compile_for_a_gpu():
    pytest.importorskip("triton", reason="triton is not installed: the kernels for GPUs cannot be compiled")
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
