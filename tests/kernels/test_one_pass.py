# SPDX-License-Identifier: Apache-2.0
"""The statistics of tensors: the compiled kernel and its torch twin against plain Python sums."""

import threading

import numpy as np
import pytest
import torch

from fedvitals import kernels, stats
from fedvitals.errors import RecordError
from fedvitals.kernels import exponents, fallback
from fedvitals.kernels.cpu import jit, statistics_ir
from support.kernel_oracle import FLOATS, INF, NAN, assert_close, oracle, random


@pytest.fixture(params=["llvm", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(jit, "load_kernel", lambda: jit.LoadedKernel(None, "the test asks for it"))
    else:
        pytest.importorskip("llvmlite", reason="llvmlite is not installed, so there is no compiled kernel to test")
        assert jit.load_kernel().kernel, jit.load_kernel().reason
    return request.param


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_length_up_to_a_few_turns_of_the_loop(backend, dtype):
    tensors = [random(length, dtype) for length in range(71)]
    assert_close(kernels.sums(tensors), [oracle(tensor) for tensor in tensors])


@pytest.mark.parametrize("block", [512, 1024, 2048, 4096])
def test_lengths_around_the_edges_of_blocks(backend, block):
    tensors = [random(2 * block + extra) for extra in (-33, -1, 0, 1, 31, 32, 33)]
    assert_close(kernels.sums(tensors), [oracle(tensor) for tensor in tensors])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF], [NAN, INF, -INF, NAN]], ids=str)
@pytest.mark.parametrize("place", [0, 77, 4095, 4096, 9_999])
def test_values_that_are_not_finite_are_counted_and_left_out(backend, dtype, bad, place):
    tensor = random(10_000 + len(bad), dtype)
    tensor[place : place + len(bad)] = torch.tensor(bad, dtype=dtype)
    assert_close(kernels.sums([tensor]), [oracle(tensor)])


def test_nothing_finite_leaves_neutral_extremes(backend):
    tensors = [torch.full((5000,), NAN), torch.full((5000,), -INF), torch.tensor([NAN, INF] * 40)]
    assert_close(kernels.sums(tensors), [oracle(tensor) for tensor in tensors])


@pytest.mark.parametrize("exponent", [-45, -40, -30, -23, -20, -15, -13, -12, -5, 0, 5, 15, 18, 19, 20, 30, 37])
def test_squares_beyond_the_range_of_float32(backend, exponent):
    tensor = (random(9001, torch.float64) * 10.0**exponent).float()
    assert_close(kernels.sums([tensor]), [oracle(tensor)])


def test_one_huge_value_among_small_ones_and_small_blocks_after_large(backend):
    tensor = random(30_000) * 1e-3
    tensor[5000] = 3e38
    tensor[20_000:] *= 1e-30
    assert_close(kernels.sums([tensor]), [oracle(tensor)])


def test_float64_beyond_float32(backend):
    tensors = [random(9001, torch.float64) * scale for scale in (1e-200, 1e-150, 1e-60, 1e60, 1e150)]
    assert_close(kernels.sums(tensors), [oracle(tensor) for tensor in tensors], relative=1e-12)


def test_zeros_of_both_signs_are_zeros(backend):
    tensor = random(10_000)
    tensor[::3], tensor[1::7] = 0.0, -0.0
    everything_zero = torch.zeros(5000) * -1
    assert_close(kernels.sums([tensor, everything_zero]), [oracle(tensor), oracle(everything_zero)])


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [0.0, 1.0, -0.1])
def test_ten_million_values(backend, shift):
    tensor = random(10_000_000) + shift
    values = tensor.double()
    expected = [1e7, values.sum(), values.square().sum(), values.abs().sum(), values.min(), values.max(), 0, 0, 0]
    expected[stats.ZEROS] = (values == 0).sum()
    assert_close(kernels.sums([tensor]), [[float(x) for x in expected]])


@pytest.mark.thorough
def test_a_constant_does_not_drift(backend):
    tensor = torch.full((10_000_000,), 0.1)
    value = float(tensor[0])
    assert_close(kernels.sums([tensor]), [[1e7, 1e7 * value, 1e7 * value**2, 1e7 * value, value, value, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_and_booleans_are_measured(backend, dtype):
    tensor = torch.arange(100).to(dtype)
    assert_close(kernels.sums([tensor]), [oracle(tensor)])


def test_one_call_for_mixed_types_none_and_empty(backend):
    tensors = [random(50, dtype) for dtype in FLOATS]
    tensors += [None, torch.empty(0), torch.empty(3, 0, 2), torch.tensor(2.5), torch.arange(4)]
    neutral = [0, 0, 0, 0, INF, -INF, 0, 0, 0]
    expected = [neutral if tensor is None else oracle(tensor) for tensor in tensors]
    assert_close(kernels.sums(tensors), expected)
    assert_close(kernels.sums([None]), stats.empty_sums(1))
    assert kernels.sums([]).shape == (0, 9)


def test_complex_numbers_are_pairs_of_real_ones(backend):
    tensor = torch.complex(random(100), random(100, seed=1)).conj()
    assert_close(kernels.sums([tensor]), [oracle(torch.view_as_real(tensor.resolve_conj()))])
    assert_close(kernels.sums([tensor.imag]), [oracle(tensor.imag)])


LAYOUTS = {
    "transposed": lambda x: x.view(60, 100).t(),
    "permuted": lambda x: x.view(4, 15, 100).permute(2, 0, 1),
    "channels_last": lambda x: x.view(10, 6, 10, 10).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:60].view(60, 1).expand(60, 100),
    "expanded_scalar": lambda x: x[0].expand(1000),
    "every_second": lambda x: x[::2],
    "inner_columns": lambda x: x.view(60, 100)[:, 3:50],
    "offset": lambda x: x[7:5000],
    "requires_gradient": lambda x: x.requires_grad_(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_layout_gives_what_its_elements_give(backend, layout, dtype):
    tensor = LAYOUTS[layout](random(6000, dtype))
    assert_close(kernels.sums([tensor]), [oracle(tensor.detach())])


@pytest.mark.parametrize("name", ["transposed", "channels_last"])
def test_dense_layouts_are_read_without_a_copy(name):
    tensor = LAYOUTS[name](random(6000))
    assert not tensor.is_contiguous()
    assert kernels.layout.flat(tensor, FLOATS).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.complex64], ids=str)
def test_clients_axis_equals_a_loop_over_clients(backend, dtype):
    stacked = [random((5, 7, 11), seed=1), random(5, seed=2), random((5, 70, 70), seed=3), random((5, 0, 3))]
    stacked = [(10 * tensor).to(dtype) for tensor in stacked]
    stacked += [stacked[0].transpose(0, 1).contiguous().transpose(0, 1), stacked[0][:, :, ::2], None]
    stacked += [stacked[0].transpose(1, 2), stacked[1][:1].expand(5)]
    expected = [kernels.sums([tensor if tensor is None else tensor[i] for tensor in stacked]) for i in range(5)]
    assert_close(kernels.sums(stacked, clients=True), np.stack(expected))


def test_clients_axis_of_nobody(backend):
    assert kernels.sums([torch.empty(0, 3), None], clients=True).shape == (0, 2, 9)
    assert kernels.sums([], clients=True).shape == (0, 0, 9)


@pytest.mark.parametrize("shapes", [[(3, 2), (4, 2)], [(), (3,)], [()]])
def test_clients_axis_must_be_shared(backend, shapes):
    with pytest.raises(RecordError, match=r"first axis differs.*Stack every layer"):
        kernels.sums([torch.zeros(shape) for shape in shapes], clients=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("measure", [kernels.sums, kernels.histogram])
def test_tensors_without_plain_memory_are_refused(backend, measure):
    good = torch.ones(3)
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        with pytest.raises(RecordError, match=r"stored as torch\.sparse.*coalesce"):
            measure([good, sparse])
    with pytest.raises(RecordError, match=r"device 'meta' \(shape \(3,\)\).*real device"):
        measure([good, torch.empty(3, device="meta")])


def test_both_backends_agree():
    tensors = [random(length, dtype) * 10.0**power for length in (1, 33, 9000) for dtype in FLOATS for power in (-4, 3)]
    assert_close(kernels.sums(tensors), fallback.sums(tensors).numpy(), relative=1e-6)


def test_the_torch_twin_works_in_chunks(monkeypatch):
    monkeypatch.setattr(fallback, "CHUNK", 1000)
    tensors = [random(2500), torch.tensor([NAN] * 1000 + [1.0])]
    assert_close(fallback.sums(tensors).numpy(), [oracle(tensor) for tensor in tensors])
    stacked = random((3, 2500))
    assert_close(fallback.sums([stacked], 3).numpy(), [[oracle(part)] for part in stacked])


OLDER = {"avx512": "+avx512f,+avx2,+f16c,+fma", "avx2": "+avx2,+f16c,+fma", "sse2": ""}


@pytest.mark.thorough
@pytest.mark.skipif(not jit._is_x86(), reason="shapes of the code for x86 processors")
@pytest.mark.parametrize("name", OLDER)
def test_code_for_older_processors(monkeypatch, name):
    llvm = pytest.importorskip("llvmlite.binding")
    missing = [feature for feature in OLDER[name].split(",") if feature not in llvm.get_host_cpu_features().flatten()]
    if missing:
        pytest.skip(f"this processor lacks {missing}")
    kernel = jit.compile_kernel("x86-64", OLDER[name])
    assert (torch.float16 in kernel.functions) == (name != "sse2")
    monkeypatch.setattr(jit, "load_kernel", lambda: jit.LoadedKernel(kernel, "built by the test"))
    tensors = [random(length, dtype) for dtype in FLOATS for length in (*range(40), 511, 8192, 9001)]
    tensors += [tensor.clone().fill_(NAN) for tensor in tensors[-3:]] + [tensors[42] * 1e-30]
    assert_close(kernels.sums(tensors), [oracle(tensor) for tensor in tensors])


@pytest.mark.parametrize(
    "machine",
    [statistics_ir.VectorShape(64, 2), statistics_ir.VectorShape(32, 2), statistics_ir.VectorShape(16, 4)],
    ids=str,
)
def test_the_assembly_is_valid(machine):
    llvm = pytest.importorskip("llvmlite.binding")
    parsed = llvm.parse_assembly(statistics_ir.module(machine, list(statistics_ir.KINDS.values())))
    parsed.verify()
    exported = {f.name for f in parsed.functions if not f.is_declaration and f.linkage.name == "external"}
    sketches = {"sketch_float32", "sketch_float64"}
    assert exported == {"sums", "sums_at", *sketches, *(f"tensor_{name}" for name in statistics_ir.KINDS)}


def test_a_kernel_that_miscounts_is_refused(monkeypatch):
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(statistics_ir, "TERMS_PER_LANE", 1)
    monkeypatch.setitem(statistics_ir.START, "add", 1.0)
    with pytest.raises(RuntimeError, match="on known values"):
        jit._check(jit.compile_kernel())


def test_two_threads_at_once():
    tensors = [random(100_000, seed=seed) for seed in range(4)]
    expected, results = kernels.sums(tensors), []
    threads = [
        threading.Thread(target=lambda: results.extend(kernels.sums(tensors) for _ in range(20))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_results_do_not_share_memory():
    first = kernels.sums([torch.ones(3)])
    kernels.sums([torch.zeros(3)])
    first += 1
    assert first[0, stats.SUM] == 4


# Histograms


def histogram_oracle(tensor):
    values = np.asarray(tensor.double().flatten())
    values = values[np.isfinite(values) & (values != 0)]
    bins = np.clip(np.frexp(values)[1] - 1 - stats.LOWEST_EXPONENT, 0, stats.EXPONENTS - 1)
    return np.bincount(bins + stats.EXPONENTS * (values > 0), minlength=2 * stats.EXPONENTS)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_histogram_counts_signs_and_exponents(dtype):
    scales = torch.exp2(torch.linspace(-150, 120, 5000))
    tensor = (random(5000) * scales).clamp(-6e4, 6e4).to(dtype)
    if dtype.is_floating_point:
        tensor[:6] = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0], dtype=dtype)
    powers = torch.tensor([-8, -4, -2, -1, 1, 2, 3, 4, 8], dtype=dtype)
    got = kernels.histogram([tensor, None, powers, torch.empty(0), powers.view(3, 3).t()])
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got[0], histogram_oracle(tensor))
    np.testing.assert_array_equal(got[2], histogram_oracle(powers))
    np.testing.assert_array_equal(got[4], got[2])
    assert got[1].sum() == got[3].sum() == 0


def test_histogram_columns_are_named_as_they_are_counted():
    got = kernels.histogram([torch.tensor([1.5, -0.25, 2.0**-60, -(2.0**40)])])[0]
    filled = {stats.HISTOGRAM_COLUMNS[i] for i in np.flatnonzero(got)}
    assert filled == {"+2^0", "-2^-2", "+2^-48", "-2^15"}


def test_histograms_add(monkeypatch):
    a, b = random(3000), random(500, seed=1) * 1e-9
    whole = kernels.histogram([torch.cat([a, b])])
    np.testing.assert_array_equal(kernels.histogram([a]) + kernels.histogram([b]), whole)
    monkeypatch.setattr(exponents, "CHUNK", 100)
    np.testing.assert_array_equal(kernels.histogram([torch.cat([a, b])]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("rows", [(), (3,), (0,)])
def test_parts_of_vectors_and_of_rows_are_measured_like_tensors(backend, rows, dtype):
    values = torch.randn(*rows, 40, generator=torch.Generator().manual_seed(0)).mul(10).to(dtype)
    sizes = (1, 0, 32, 7)
    parts = kernels.sums(values.split(sizes, dim=-1), clients=bool(rows))
    np.testing.assert_array_equal(kernels.sums_of_parts(values, sizes), parts)
    strided = torch.stack([values, values], dim=-1)[..., 0]
    np.testing.assert_array_equal(kernels.sums_of_parts(strided, sizes), parts)
