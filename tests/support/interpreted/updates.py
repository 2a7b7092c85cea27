# SPDX-License-Identifier: Apache-2.0
"""The kernel that measures updates on a GPU, interpreted, against plain torch. Run like sums.py, beside it."""

import pytest
import torch

from fedvitals.kernels import count_sketch
from fedvitals.kernels.cuda.sums import Tuning
from fedvitals.kernels.cuda.updates import measure_update
from support.kernel_oracle import assert_close, oracle

SMALL = Tuning(warps=1, most=2048, items=1)  # an item is two rows of tiles: the interpreter is slow
SHAPES = [(40, 70), (3,), (0,), (1,), (57, 9), (5, 5, 5)]
FLOATS = [(torch.float32,), (torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float32)]


def model(dtypes, scale=1.0):
    """Parameters as they are, and as they were, in one vector."""
    stream = torch.Generator().manual_seed(0)
    now = [
        (scale * torch.randn(shape, generator=stream)).to(dtypes[place % len(dtypes)])
        for place, shape in enumerate(SHAPES)
    ]
    flat = torch.cat([p.reshape(-1).float() for p in now])
    before = flat + 0.1 * scale * torch.randn(len(flat), generator=stream)
    return now, before if len(dtypes) > 1 else before.to(dtypes[0])


def assert_same(rows, tensors):
    assert_close(rows.numpy(), [oracle(t.float()) for t in tensors], relative=1e-6)


@pytest.mark.parametrize(("dtypes", "offset"), [*((own, 0) for own in FLOATS), (FLOATS[0], 512), (FLOATS[0], 1 << 32)])
def test_everything_that_is_measured_of_an_update(dtypes, offset):
    now, before = model(dtypes)
    flat = torch.cat([p.reshape(-1).float() for p in now])
    initial, kept = torch.randn(len(flat)), torch.empty(len(flat))
    settings = {"initial": initial, "sketch_parameters": True, "changes": kept, "tuning": SMALL}
    update = measure_update(now, before, offset=offset, sketch=True, weigh=True, **settings)
    change = flat - before.float()
    assert torch.equal(kept, change)
    assert_same(update.rows, change.split([p.numel() for p in now]))
    assert_same(update.weight_rows, now)
    torch.testing.assert_close(update.sketch, count_sketch(change, offset), rtol=0, atol=1e-6)
    torch.testing.assert_close(update.drift_sketch, count_sketch(flat, offset), rtol=0, atol=1e-5)
    assert float(update.start_squares) == pytest.approx(float(before.double().square().sum()), rel=1e-6)
    assert float(update.drift_squares) == pytest.approx(float((flat - initial).double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
def test_values_that_are_not_finite_or_whose_squares_are_out_of_range(scale):
    now, before = model((torch.float32,), scale)
    if scale == 1.0:
        now[0][3, 5], now[1][2], now[4][2], before[-1] = torch.nan, -torch.inf, torch.inf, torch.inf
    flat = torch.cat([p.reshape(-1) for p in now])
    update = measure_update(now, before, weigh=True, tuning=SMALL)
    assert_same(update.rows, (flat - before).split([p.numel() for p in now]))
    assert_same(update.weight_rows, now)
    assert update.sketch is update.drift_sketch is update.drift_squares is None


def test_what_is_not_asked_for_is_not_measured_and_the_rest_is_the_same():
    now, before = model((torch.float32,))
    brief, whole = (measure_update(now, before, sketch=own, weigh=own, tuning=SMALL) for own in (False, True))
    assert brief.weight_rows is brief.sketch is None
    assert torch.equal(brief.rows, whole.rows)
    assert torch.equal(measure_update(now, before, sketch=True, tuning=SMALL).sketch, whole.sketch)  # to the last bit


def test_parameters_that_are_not_contiguous_are_read_in_their_order():
    whole = torch.randn(30, 20)
    now, before = [whole.t()], torch.zeros(600)
    kept = torch.empty(600)
    measure_update(now, before, changes=kept, tuning=SMALL)
    assert torch.equal(kept, whole.t().reshape(-1))
