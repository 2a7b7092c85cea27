# SPDX-License-Identifier: Apache-2.0
"""Copies of flat states for a tape: exact, the tape's own, and in memory that is reused once it is let go."""

import torch

from fedvitals.lab.state import StateCopies, StateLayout
from fedvitals.replay.tape.digests import digest_of

LAYOUT = StateLayout(("weight", "bias"), ((3, 4), (3,)), 2, 15, 15)


def test_a_copy_does_not_follow_what_was_copied():
    state = torch.randn(15)
    views = {name: tensor.clone() for name, tensor in LAYOUT.views(state).items()}
    (copy,) = StateCopies(LAYOUT)([state])
    state.zero_()
    assert digest_of(copy) == digest_of(views)


def test_memory_is_reused_once_it_is_let_go_and_never_before():
    copies, states = StateCopies(LAYOUT), torch.randn(50, 15)
    held, places = [], set()
    for number, state in enumerate(states):
        held += copies([state.clone()])
        places.add(held[-1].flat.data_ptr())
        if len(held) > 3:
            gone = held.pop(number % 3)
            assert gone["weight"].shape == (3, 4)
            del gone
        expected = {copy.flat.data_ptr() for copy in held}
        assert len(expected) == len(held)
    assert len(places) <= 5


def test_vectors_of_other_lengths_and_types_are_copied_apart():
    copies = StateCopies(LAYOUT)
    vectors = [torch.randn(15), torch.randn(15, dtype=torch.float64), torch.randn(12)]
    for _ in range(2):
        copied = copies(vectors)
        assert all(torch.equal(copy.flat, vector) for copy, vector in zip(copied, vectors, strict=True))
        assert [*copied[2]] == ["weight"]
        del copied
