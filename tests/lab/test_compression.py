# SPDX-License-Identifier: Apache-2.0
"""Compression: what is decoded is what is said to arrive, in the bytes that are counted, within the stated error."""

from __future__ import annotations

import math
from typing import Union

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedvitals.errors import ConfigError
from fedvitals.lab.compression import (
    COMPRESSIONS,
    FP16,
    Int8,
    PayloadError,
    Plain,
    Pruning,
    Sign,
    TopK,
    send_update,
    update_bytes,
)

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

ALL = [
    Plain(),
    FP16(),
    TopK(0.1),
    TopK(0.01),
    TopK(1.0),
    Int8(),
    Int8(block=3),
    Sign(),
    Sign(block=3),
    Pruning(0.5),
    Pruning(0.0),
]
HEAD, SPARSE_HEAD = 5, 10

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
anything = st.floats(width=32)


def vectors(elements, least=0):
    return hnp.arrays(np.float32, st.integers(least, 70), elements=elements)


def passed(compression, values):
    return compression.decode(compression.encode(values))


@pytest.mark.parametrize("compression", ALL, ids=repr)
@given(values=vectors(anything))
def test_the_message_is_the_decoded_payload_and_its_length(compression, values):
    start = torch.linspace(-1, 1, len(values))
    state = torch.from_numpy(values)
    message = send_update(compression, state, start, len(values))
    sent = (state - start).numpy() if compression.differences else values
    payload = compression.encode(sent)
    received = torch.from_numpy(compression.decode(payload))
    expected = start + received if compression.differences else received
    assert message.bytes == len(payload) == update_bytes(compression, len(values), len(values))
    assert message.raw_bytes == 4 * len(values)
    torch.testing.assert_close(message.state, expected, rtol=0, atol=0, equal_nan=True)
    assert message.state.dtype == torch.float32


@given(values=vectors(anything))
def test_plain_keeps_every_bit(values):
    assert passed(Plain(), values).tobytes() == values.tobytes()
    assert len(Plain().encode(values)) == HEAD + 4 * len(values)


@given(values=vectors(anything))
def test_half_precision_errs_by_half_a_step_and_keeps_what_is_not_finite(values):
    got = passed(FP16(), values)
    small = np.isfinite(values) & (np.abs(values) <= 65504)
    bound = np.maximum(np.abs(values[small]) * 2.0**-11, 2.0**-25)
    assert (np.abs(got[small] - values[small]) <= bound).all()
    np.testing.assert_array_equal(got[~np.isfinite(values)], values[~np.isfinite(values)])
    beyond = np.isfinite(values) & (np.abs(values) > 65504)
    np.testing.assert_array_equal(got[beyond], np.sign(values[beyond]) * 65504)
    assert len(FP16().encode(values)) == HEAD + 2 * len(values)


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@given(values=vectors(anything, least=1))
def test_top_k_keeps_the_largest_exactly_and_nothing_else(share, values):
    got = passed(TopK(share), values)
    keep = max(1, round(share * len(values)))
    magnitudes = np.where(np.isnan(values), np.inf, np.abs(values))
    kept = np.flatnonzero(got.view(np.uint32) == values.view(np.uint32))  # a kept or an originally zero value
    lost = np.setdiff1d(np.arange(len(values)), kept)
    assert (got[lost] == 0).all()
    assert len(lost) <= len(values) - keep
    if len(lost):
        assert magnitudes[lost].max() <= np.sort(magnitudes)[len(values) - keep]
    places = min(4 * keep, math.ceil(len(values) / 8))
    assert len(TopK(share).encode(values)) == SPARSE_HEAD + places + 4 * keep


def test_top_k_by_hand():
    values = np.array([0.1, -5, 2, math.nan, 5, -math.inf], np.float32)
    np.testing.assert_array_equal(passed(TopK(0.5), values), np.array([0, -5, 0, math.nan, 0, -math.inf], np.float32))
    np.testing.assert_array_equal(passed(TopK(0.5), np.ones(4, np.float32)), [1, 1, 0, 0])  # of equal ones the first


@pytest.mark.parametrize("block", [1, 7, 256])
@given(values=vectors(anything))
def test_int8_errs_by_half_a_scale_of_its_block(block, values):
    got = passed(Int8(block), values)
    for begin in range(0, len(values), block):
        here, there = values[begin : begin + block].astype(np.float64), got[begin : begin + block].astype(np.float64)
        good = np.isfinite(here)
        assert np.isnan(there[~good]).all()
        largest = np.abs(here[good]).max(initial=0)
        # Half a scale, the rounding of the scale and of the result to float32, and the smallest number above 0.
        bound = largest / 254 + largest * 2.0**-23 + 127 * 1.5e-45
        assert (np.abs(there[good] - here[good]) <= bound).all()
    assert len(Int8(block).encode(values)) == HEAD + len(values) + 4 * math.ceil(len(values) / block)


def test_int8_by_hand():
    values = np.array([127, -127, 0.4, 0.6, math.nan, math.inf], np.float32)
    np.testing.assert_array_equal(passed(Int8(), values), [127, -127, 0, 1, math.nan, math.nan])


@pytest.mark.parametrize("block", [1, 7, 1024])
@given(values=vectors(finite))
def test_sign_keeps_signs_and_the_mean_magnitude_of_each_block(block, values):
    got = passed(Sign(block), values)
    for begin in range(0, len(values), block):
        here, there = values[begin : begin + block].astype(np.float64), got[begin : begin + block]
        mean = np.float32(math.fsum(np.abs(here)) / len(here))
        np.testing.assert_allclose(there, np.where(here < 0, -mean, mean), rtol=1e-6)
    assert len(Sign(block).encode(values)) == HEAD + 4 * math.ceil(len(values) / block) + math.ceil(len(values) / 8)


def test_sign_by_hand():
    values = np.array([3, -1, 0, 4, -2, -6, math.nan, 1], np.float32)
    np.testing.assert_array_equal(passed(Sign(block=4), values), [2, -2, 2, 2, *[math.nan] * 4])
    np.testing.assert_array_equal(passed(Sign(block=4), values[:6]), [2, -2, 2, 2, -4, -4])  # a last block of two
    assert Sign(block=4).encode(values[:4])[HEAD:] == np.float32(2).tobytes() + bytes([0b01000000])


@pytest.mark.parametrize("kind", [FP16, lambda **k: TopK(0.1, **k), Int8, Sign])
def test_with_error_feedback_what_arrived_and_the_residual_are_what_was_trained(kind):
    """Over 30 rounds, in float64 beside it: sum of decoded changes + residual = sum of true changes."""
    compression, stream = kind(error_feedback=True), torch.Generator().manual_seed(5)
    true, arrived, residual = torch.zeros(300).double(), torch.zeros(300).double(), None
    for _ in range(30):
        start = torch.zeros(301)
        state = torch.randn(301, generator=stream)
        message = send_update(compression, state, start, 300, residual=residual)
        residual = message.residual
        assert message.state[300] == state[300]  # a buffer
        true, arrived = true + state[:300].double(), arrived + message.state[:300].double()
    torch.testing.assert_close(arrived + residual.double(), true, atol=2e-5, rtol=0)
    without = send_update(kind(), state, start, 300)
    assert without.residual is None
    assert without.bytes == message.bytes


def test_error_feedback_by_hand():
    """TopK of one in two: what was left out in one round is sent in the next, before what is smaller."""
    compression, start = TopK(0.5, error_feedback=True), torch.tensor([1.0, 1.0])
    first = send_update(compression, torch.tensor([4.0, 3.0]), start, 2)
    assert first.state.tolist() == [4.0, 1.0]
    assert first.residual.tolist() == [0.0, 2.0]
    second = send_update(compression, torch.tensor([4.0, 3.0]), start, 2, residual=first.residual)
    assert second.state.tolist() == [1.0, 5.0]
    assert second.residual.tolist() == [3.0, 0.0]


def test_what_is_not_finite_does_not_stay_in_the_residual():
    state = torch.tensor([math.nan, math.inf, -2.0, 1.0])
    message = send_update(TopK(0.25, error_feedback=True), state, torch.zeros(4), 4)
    assert message.residual.tolist() == [0.0, 0.0, -2.0, 1.0]


def test_pruning_takes_small_weights_out_of_the_state_not_of_the_difference():
    start = torch.tensor([5.0, 0.1, -3.0, 0.2, 7.0])
    state = torch.tensor([5.1, 0.9, -3.1, 0.3, 8.0])
    message = send_update(Pruning(0.5), state, start, 4)
    assert message.state.tolist() == torch.tensor([5.1, 0, -3.1, 0, 8.0]).tolist()  # the last one is a buffer
    assert message.bytes == SPARSE_HEAD + 1 + 2 * 4 + 4


def test_top_k_leaves_the_rest_at_the_start_and_buffers_whole():
    start = torch.tensor([5.0, 0.1, -3.0, 0.2, 7.0])
    state = torch.tensor([5.5, 0.2, -3.1, 0.3, 8.0])
    assert send_update(TopK(0.25), state, start, 4).state.tolist() == torch.tensor([5.5, 0.1, -3, 0.2, 8]).tolist()


@pytest.mark.parametrize("compression", ALL, ids=repr)
def test_a_state_that_does_not_fit_goes_as_it_is(compression):
    for wrong in (torch.ones(3, dtype=torch.float64), torch.ones(4)):
        message = send_update(compression, wrong, torch.zeros(3), 3)
        assert message.state is wrong
        assert message.bytes == wrong.numel() * wrong.element_size()


def test_what_each_kind_takes_of_a_real_model():
    state = torch.randn(118_507, generator=torch.Generator().manual_seed(3))
    shares = {
        repr(one).replace(", error_feedback=False", "").replace("error_feedback=False", ""): send_update(
            one, state, torch.zeros_like(state), len(state)
        ).bytes
        / (4 * len(state))
        for one in ALL
    }
    assert shares["TopK(share=0.01)"] == pytest.approx(0.02, rel=1e-3)  # 4 + 4 bytes for each hundredth value
    assert shares["TopK(share=0.1)"] == pytest.approx(0.1 + 1 / 32, rel=1e-3)  # a bitmap is less
    assert shares["FP16()"] == pytest.approx(0.5, rel=1e-3)
    assert shares["Int8(block=256)"] == pytest.approx(0.25 + 1 / 256, rel=1e-3)
    assert shares["Sign(block=1024)"] == pytest.approx((1 + 32 / 1024) / 32, rel=1e-3)
    assert shares["Pruning(share=0.5)"] == pytest.approx(0.5 + 1 / 32, rel=1e-3)


@pytest.mark.parametrize("compression", ALL, ids=repr)
def test_broken_bytes_are_refused_not_misread(compression):
    payload = compression.encode(np.arange(40, dtype=np.float32))
    for broken in (b"", payload[:3], payload[:7], payload[:-1], payload + b"x", b"\xff" + payload[1:]):
        with pytest.raises(PayloadError):
            compression.decode(broken)


def test_places_outside_of_the_values_are_refused():
    payload = bytearray(TopK(0.01).encode(np.arange(200, dtype=np.float32)))
    payload[SPARSE_HEAD : SPARSE_HEAD + 4] = (200).to_bytes(4, "little")
    with pytest.raises(PayloadError, match="places"):
        TopK(0.01).decode(bytes(payload))


def test_a_payload_of_another_kind_is_named():
    with pytest.raises(PayloadError, match="FP16 cannot read this payload: it is of Int8"):
        FP16().decode(Int8().encode(np.ones(3, np.float32)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0),
        lambda: TopK(1.1),
        lambda: Pruning(1),
        lambda: Pruning(-0.1),
        lambda: Int8(block=0),
        lambda: Sign(block=0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ConfigError, match="cannot be"):
        make()


@pytest.mark.parametrize("compression", ALL, ids=repr)
def test_a_description_survives_being_written_down(compression):
    assert msgspec.json.decode(msgspec.json.encode(compression), type=Union[(*COMPRESSIONS,)]) == compression


def test_the_kinds_are_called_as_in_the_documents():
    kinds = [msgspec.json.decode(msgspec.json.encode(one()))["kind"] for one in COMPRESSIONS]
    assert kinds == ["plain", "fp16", "top_k", "int8", "sign", "pruning"]
