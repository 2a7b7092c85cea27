# SPDX-License-Identifier: Apache-2.0
"""What is remembered of senders is bounded for all of them together, however many names a machine takes on."""

import pytest

from fedvitals.errors import RecordError
from fedvitals.transport.sender_limits import (
    METRIC_NAMES,
    NAMES_OF_ALL,
    ROUND_REFUSALS,
    SENDERS,
    SenderQuotas,
    entry_of_sender,
)


def test_all_senders_together_bring_a_bounded_number_of_names():
    quotas = SenderQuotas()
    admitted = [quotas.excess_name(f"n{i // 200}", f"user.{i}") is None for i in range(NAMES_OF_ALL + 3 * METRIC_NAMES)]
    assert sum(admitted) == NAMES_OF_ALL
    assert quotas.excess_name("another", "user.0") is None, "what somebody has brought is free"
    assert quotas.excess_name("another", "loss") is None
    assert quotas.excess_name("another", "user.new") is not None


def test_of_too_many_senders_the_first_is_forgotten():
    quotas = SenderQuotas()
    for _ in range(ROUND_REFUSALS):
        quotas.report("first", 0, whole=True)
    with pytest.raises(RecordError, match="the rest is not read"):
        quotas.message_limits("first", 0, 10, 100)
    for i in range(SENDERS):
        quotas.message_limits(f"n{i}", 0, 10, 100)
    quotas.message_limits("first", 0, 10, 100)  # begins anew


def test_the_entries_of_senders_do_not_grow_beyond_their_bound():
    entries = {}
    for i in range(SENDERS + 10):
        entry_of_sender(entries, f"n{i}", dict)["seen"] = i
    assert len(entries) == SENDERS
    assert "n9" not in entries
    assert entry_of_sender(entries, "n10", dict) == {"seen": 10}
