# SPDX-License-Identifier: Apache-2.0
"""Forgetting, lengths of texts and jumps of the loss of language models."""

from __future__ import annotations

import pytest

from fedvitals.diagnosis.detectors.language import DETECTORS
from support.histories import findings_of, history_of


def issues(history, number):
    return [found.issue for found in findings_of(DETECTORS, history, number)]


@pytest.mark.parametrize(
    ("held_back", "loss", "expected"),
    [
        ([2.0, 2.0, 2.12, 2.14], [3.0, 3.0, 3.0, 3.0], ["FORGETTING"]),
        ([2.0, 2.0, 2.0, 2.3], [3.0, 3.0, 3.0, 3.0], ["FORGETTING"]),  # at once
        ([2.0, 2.0, 2.12, 2.14], [3.0, 3.0, 2.8, 2.7], []),  # the clients gain more
        ([2.0, 2.0, 2.12, 2.0], [3.0] * 4, []),  # over again
        ([2.0, 2.01, 2.02, 2.03], [3.0] * 4, []),  # hardly
        ([2.2, 2.1, 2.05, 2.0], [3.0] * 4, []),
        ([2.0, 2.0, 2.12, 2.14], [None] * 4, ["FORGETTING"]),  # where nobody measures what the clients gain
        ([2.0, 2.0, float("nan"), 2.4], [3.0] * 4, []),
    ],
)
def test_forgetting_is_more_lost_than_gained(held_back, loss, expected):
    history = history_of({("held_back.loss", None): held_back, ("loss", None): loss})
    assert issues(history, 3) == expected


@pytest.mark.parametrize(
    ("held_back", "perplexities", "expected"),
    [
        ([2.7, 2.7], [14.0, 30.0], [[], ["FORGETTING"]]),  # all of it in the first round
        ([2.7, 2.7], [14.0, 3.0], [[], []]),  # the clients gain more
        ([2.01, 2.02], [14.0, 14.0], [[], []]),
        ([2.7, 2.7], [14.0, None], [[], []]),  # what they gain is unknown
    ],
)
def test_what_is_lost_in_the_first_round_is_seen_by_the_model_before_it(held_back, perplexities, expected):
    series = {("held_back.loss", None): held_back, ("initial.held_back.loss", None): [2.0, None]}
    history = history_of({**series, ("perplexity.before", "c0"): perplexities})
    assert [issues(history, number) for number in range(2)] == expected
    for found in findings_of(DETECTORS, history, 1):
        assert found.message == (
            "The loss on held-back texts rose from 2.000 (before the first round) to 2.700; the clients' own changed "
            "by +0.762 meanwhile."
        )
        assert found.evidence["since"] == 0


def lengths(*values, **more):
    series = {("tokens.length", f"c{i}"): [float(value)] for i, value in enumerate(values)}
    return history_of({**series, **{(f"tokens.{name}", "c0"): [value] for name, value in more.items()}})


def test_texts_of_another_length_are_a_note_and_cut_ones_a_warning():
    (found,) = findings_of(DETECTORS, lengths(900, 100, 110, 90, 120), 0)
    assert (found.issue, found.severity, [own.node for own in found.suspects]) == ("LENGTH_IMBALANCE", "note", ["c0"])
    (found,) = findings_of(DETECTORS, lengths(900, 100, 110, 90, 120, full=0.8, padding=0.1), 0)
    assert found.severity == "warning"
    assert "cut off" in found.message
    (found,) = findings_of(DETECTORS, lengths(10, 100, 110, 90, 120, padding=0.9), 0)
    assert "padding" in found.message


def test_texts_of_like_lengths_and_few_clients_say_nothing():
    assert issues(lengths(200, 100, 110, 90, 120), 0) == []
    assert issues(lengths(900, 100, 110), 0) == []


@pytest.mark.parametrize(
    ("losses", "tokens", "expected"),
    [
        ([3.0, 2.9, 2.85, 2.8, 2.78, 2.75, 4.0], 100.0, ["LOSS_SPIKE"]),
        ([3.0, 2.9, 2.85, 2.8, 2.78, 2.75, 2.9], 100.0, []),
        ([3.0, 2.5, 3.1, 2.4, 3.2, 2.5, 3.3], 100.0, []),  # it always moves so
        ([3.0, 2.9, 2.85, 2.8, 2.78, 2.75, 4.0], None, []),  # no language model
        ([2.75, 4.0], 100.0, []),  # too little is known
    ],
)
def test_a_jump_far_beyond_the_usual_changes_is_a_spike(losses, tokens, expected):
    history = history_of({("loss", None): losses, ("tokens", "c0"): [tokens] * len(losses)})
    assert issues(history, len(losses) - 1) == expected
