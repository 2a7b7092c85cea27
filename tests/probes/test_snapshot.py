# SPDX-License-Identifier: Apache-2.0
"""A client's update, measured in pieces, against the same in one piece and in plain torch."""

import numpy as np
import pytest
import torch

from fedvitals.kernels import count_sketch, sums
from fedvitals.probes import snapshot
from fedvitals.probes.host_copies import to_host
from fedvitals.probes.snapshot import InitialModel, ParameterSnapshot, pieces_of, sketch_of
from support.pretended_device import Pretending, away

SHAPES = [(40, 70), (3,), (0,), (1,), (257, 9), (5, 5, 5)]


def parameters(seed=0, dtypes=(torch.float32,)):
    stream = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=stream).to(dtypes[i % len(dtypes)]).requires_grad_()
        for i, shape in enumerate(SHAPES)
    ]


def moved(tensors, seed=1):
    with torch.no_grad():
        for tensor, other in zip(tensors, parameters(seed), strict=True):
            tensor.add_(0.1 * other.to(tensor.dtype))


def vector(tensors):
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


def measured(kept, **settings):
    update = kept.measure(**settings)
    update.settle(to_host(update.tensors))
    return update


@pytest.mark.parametrize("length", [1, 256, 300, 2800, 2801, 100_000])
def test_pieces_cover_every_value_once_and_in_order(length):
    sizes = (2800, 3, 0, 1, 2313, 125)
    places = [
        (layer, value) for piece in pieces_of(sizes, length) for layer, first, last in piece.parts
        for value in range(first, last)
    ]  # fmt: skip
    assert places == [(layer, value) for layer, size in enumerate(sizes) for value in range(size)]
    assert [piece.start for piece in pieces_of(sizes, length)] == [*range(0, sum(sizes), length)]


@pytest.mark.parametrize("piece", [256, 1024, 1 << 20])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)], ids=str)
def test_an_update_is_the_same_in_pieces_and_in_one(piece, dtypes, monkeypatch):
    monkeypatch.setattr(snapshot, "PIECE", piece)
    tensors = parameters(dtypes=dtypes)
    before, initial = vector(tensors), torch.randn(5242)
    kept = ParameterSnapshot(tensors)
    assert torch.equal(kept.vector, before)
    moved(tensors)
    change = vector(tensors) - before
    update = measured(kept, keep=True, sketch=True, weigh=True, initial=InitialModel(len(initial), initial))
    assert torch.equal(update.vector, change)
    assert update.sketch is None
    wanted = sums(change.split([t.numel() for t in tensors]))
    np.testing.assert_allclose(update.rows, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(update.weight_rows, sums([t.detach().float() for t in tensors]), rtol=1e-6, atol=1e-6)
    assert update.start_norm == pytest.approx(float(before.double().norm()), rel=1e-5)
    assert update.drift == pytest.approx(float((vector(tensors).double() - initial.double()).norm()), rel=1e-5)
    without = measured(kept, keep=False, sketch=True)
    assert without.vector is None
    torch.testing.assert_close(without.sketch, count_sketch(change), rtol=0, atol=1e-10)
    brief = measured(kept, keep=False, sketch=False, brief=True)
    assert brief.rows.shape == (1, 9)
    np.testing.assert_allclose(brief.rows, sums([change]), rtol=1e-6, atol=1e-6)


def test_drift_from_a_model_that_is_too_large_to_keep_is_estimated():
    tensors = parameters()
    start, length = sketch_of(tensors), sum(t.numel() for t in tensors)
    kept = ParameterSnapshot(tensors)
    moved(tensors)
    update = measured(kept, keep=True, sketch=True, initial=InitialModel(length, None, start))
    assert update.drift == pytest.approx(float(update.vector.norm()), rel=0.2)


def test_a_changed_value_that_is_not_finite_is_counted():
    tensors = parameters()
    kept = ParameterSnapshot(tensors)
    with torch.no_grad():
        tensors[0][3, 5], tensors[1][1] = torch.nan, torch.inf
    rows = measured(kept, keep=False, sketch=True).rows
    assert rows[:, 7].tolist() == [1, 0, 0, 0, 0, 0]
    assert rows[:, 8].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("start", [0, 256, 256 * 40, 2**32])
def test_sketches_of_parts_add_up(start):
    vectors = torch.randn(2, 256 * 9 + 17, dtype=torch.float64)
    parts = count_sketch(vectors[:, : 256 * 4], start) + count_sketch(vectors[:, 256 * 4 :], start + 256 * 4)
    torch.testing.assert_close(parts, count_sketch(vectors, start), rtol=0, atol=1e-10)
    assert not torch.equal(count_sketch(vectors, start + 256), count_sketch(vectors, start))


def test_a_model_without_parameters():
    update = measured(ParameterSnapshot([]), keep=True, sketch=True)
    assert update.vector.numel() == len(update.rows) == 0


def test_memory_is_used_again_and_never_by_two(monkeypatch):
    monkeypatch.setattr(snapshot, "PIECE", 256)
    buffers, tensors = [], parameters()
    first, second = ParameterSnapshot(tensors, buffers), ParameterSnapshot(tensors, buffers)
    kept = measured(first, keep=True, sketch=False)
    first.release()
    (memory,) = buffers
    moved(tensors)
    third = ParameterSnapshot(tensors, buffers)
    assert not buffers
    assert torch.equal(memory, vector(tensors))
    moved(tensors)
    change = measured(second, keep=True, sketch=False).vector
    torch.testing.assert_close(change, vector(tensors) - vector(parameters()))
    assert not kept.vector.any()
    third.release()
    third.release()
    assert len(buffers) == 1


@pytest.mark.parametrize(("layer", "shape"), [(0, (50, 70)), (5, (6, 5, 5)), (0, (20, 70)), (3, (0,))])
def test_parameters_that_were_resized_are_not_measured(layer, shape):
    tensors = parameters()
    kept = ParameterSnapshot(tensors)
    tensors[layer].data = torch.randn(shape)
    with pytest.raises(ValueError, match="were resized inside the client's scope"):
        kept.measure(keep=True, sketch=False)


def test_memory_of_an_evaluation_without_autograd_is_used_again_by_a_training(monkeypatch):
    monkeypatch.setattr(snapshot, "PIECE", 256)
    buffers, tensors = [], parameters()
    with torch.inference_mode():
        ParameterSnapshot(tensors, buffers).release()
    kept = ParameterSnapshot(tensors, buffers)
    moved(tensors)
    change = measured(kept, keep=True, sketch=False).vector
    torch.testing.assert_close(change, vector(tensors) - vector(parameters()))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_a_model_whose_layers_lie_on_two_devices(exact, keep, monkeypatch):
    monkeypatch.setattr(snapshot, "_piece_length", lambda _: 256)
    start, change = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0))
    initial = InitialModel(1024, start) if exact else InitialModel(1024, None, count_sketch(start))
    with Pretending():
        tensors = [away(start[:512].clone()), start[512:].clone()]
        kept = ParameterSnapshot(tensors)
        for tensor, part in zip(tensors, change.split(512), strict=True):
            tensor.copy_(tensor + part.to(tensor.device))
        update = measured(kept, keep=keep, sketch=True, weigh=True, initial=initial)
        vectors = None if update.vector is None else update.vector.cpu()
    change = (start + change) - start
    np.testing.assert_allclose(update.rows, sums(change.split(512)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(update.weight_rows, sums((start + change).split(512)), rtol=1e-5, atol=1e-5)
    assert update.drift == pytest.approx(float(change.norm()), rel=1e-5 if exact else 0.2)
    if vectors is None:
        torch.testing.assert_close(update.sketch, count_sketch(change), rtol=0, atol=1e-8)
    else:
        assert torch.equal(vectors, change)


@pytest.mark.gpu
def test_a_snapshot_on_the_host_is_read_when_it_is_complete(monkeypatch):
    monkeypatch.setattr(snapshot, "_has_room", lambda _: False)
    tensors = [torch.randn(1 << 20, device="cuda")]
    torch.cuda._sleep(10**9)
    assert torch.equal(ParameterSnapshot(tensors).vector, tensors[0].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)], ids=str)
def test_a_gpu_measures_in_one_pass_what_a_cpu_measures_in_pieces(dtypes, keep):
    updates = []
    for device in ("cuda", "cpu"):
        tensors = [p.detach().to(device).requires_grad_() for p in parameters(dtypes=dtypes)]
        kept = ParameterSnapshot(tensors)
        assert kept._in_one_pass == (device == "cuda")
        with torch.no_grad():
            for tensor, other in zip(tensors, parameters(1), strict=True):
                tensor.add_((0.1 * other).to(device, tensor.dtype))
        initial = InitialModel(5242, torch.ones(5242, device=device))
        updates.append(measured(kept, keep=keep, sketch=True, weigh=True, initial=initial))
    gpu, cpu = updates
    np.testing.assert_allclose(gpu.rows, cpu.rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gpu.weight_rows, cpu.weight_rows, rtol=1e-5, atol=1e-5)
    assert (gpu.start_norm, gpu.drift) == pytest.approx((cpu.start_norm, cpu.drift), rel=1e-6)
    if keep:
        assert torch.equal(gpu.vector.cpu(), cpu.vector)
    else:
        torch.testing.assert_close(gpu.sketch, cpu.sketch, rtol=0, atol=1e-5)
