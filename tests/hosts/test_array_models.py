# SPDX-License-Identifier: Apache-2.0
"""Memory for updates of array models, used again."""

import numpy as np
import torch

from fedvitals.hosts.array_models import ReusableVectors, difference_of


def test_a_vector_is_used_again_when_nobody_holds_it():
    vectors = ReusableVectors()
    first, second = vectors(10, np.float32), vectors(10, np.float32)
    assert not np.shares_memory(first, second)
    address = first.ctypes.data
    held = torch.from_numpy(second)[3:]  # a view of a tensor, too
    del first, second
    third, fourth = vectors(10, np.float32), vectors(10, np.float32)
    assert third.ctypes.data == address
    assert fourth.ctypes.data not in (address, held.data_ptr() - 3 * 4)
    assert vectors(10, np.float64).dtype == np.float64


def test_no_more_than_so_many_bytes_are_kept():
    vectors = ReusableVectors(most=100)
    held = [vectors(10, np.float32) for _ in range(5)]
    assert len({vector.ctypes.data for vector in held}) == 5
    assert len(vectors._kept) == 2


def test_a_difference_is_computed_in_the_memory_of_one_that_is_gone():
    vectors, sent = ReusableVectors(), {"a": np.zeros(4, np.float32)}
    first = difference_of(sent, {"a": np.ones(4, np.float32)}, vectors).tensors()
    address = first.vector.data_ptr()
    second = difference_of(sent, {"a": np.full(4, 2, np.float32)}, vectors).tensors()
    assert first.vector.tolist() == [1] * 4
    assert second.vector.tolist() == [2] * 4
    del first
    assert difference_of(sent, {"a": np.full(4, 3, np.float32)}, vectors).tensors().vector.data_ptr() == address
    assert second.vector.tolist() == [2] * 4
