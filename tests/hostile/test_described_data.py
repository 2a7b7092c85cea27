# SPDX-License-Identifier: Apache-2.0
"""One client that describes data which do not exist, while another's labels are wrong: it hides nothing but itself."""

import math

import pytest
import torch

from fedvitals.probes.data_sketch import describe
from fedvitals.records import Event, Finding, Where
from support.hostile_federation import HERE, HONEST, LIAR, THERE, federation

WORDS = "ALL MODELS ARE STOLEN \x1b[31m"
ILL, CLASSES = "bob", 6


def described(node, *, flipped=False, **lies):
    stream = torch.Generator().manual_seed([LIAR, *HONEST].index(node))
    centres = 2 * torch.randn(CLASSES, 20, generator=torch.Generator().manual_seed(9))
    y = torch.randint(0, CLASSES, (400,), generator=stream)
    x = centres[y] + torch.randn(400, 20, generator=stream)
    description = describe(x, torch.where(y == 1, 4, y) if flipped else y, len(y))
    name, text, data = description.remark(0)
    return Event(Where(THERE, None, node), 1.0, "info", name, text, {**data, **lies})


LIES = {
    "freedom": {"freedom": 1e308},
    "counts": {"counts": [1e308] * CLASSES},
    "spreads": {"spreads": [1e308] * CLASSES},
    "means": {"means": [[1e154] * 16] * CLASSES},
    "largest means": {"means": [[1e308] * 16] * CLASSES},
    "covariance": {"covariance": [1e300] * 136},
    "no covariance": {"covariance": [(-1.0) ** (i % 3) for i in range(136)]},
    "checksums": {"inputs": {WORDS: 1}, "labels": [WORDS]},
    "samples": {"samples": WORDS},
    "classes": {"classes": [10**300 + i for i in range(CLASSES)]},
    "a change": {"means": None, "change": "label_noise", "moved": math.inf},
}


@pytest.mark.parametrize("name", LIES)
def test_data_that_cannot_be_are_refused_and_hide_nobody(name):
    lie = described(LIAR, **LIES[name])
    lie.data.pop("means") if lie.data["means"] is None else None
    number = 0

    def brings(node):
        return [described(node, flipped=node == ILL)] if number == 1 else []

    with federation(lambda n: [lie] if n == 1 else [], brings=brings, privacy=3) as found:
        for number in range(4):
            found.round(number)
    assert found.refusals() == [(LIAR, 1)]
    assert not found.sink.events("monitor.error")
    accused = {(f.issue, f.where.node) for f in found.sink.of(Finding)}
    assert accused == {("LABEL_FLIP", ILL), ("TELEMETRY_LOST", LIAR)}
    assert not [f for f in found.sink.of(Finding) if "STOLEN" in f.message]


def test_a_description_that_no_program_of_ours_writes_is_refused():
    with federation(lambda _: [Event(HERE, 1.0, "info", "data", WORDS, {"x": WORDS})], privacy=3) as found:
        found.round(0)
    assert not found.sink.events("data", node=LIAR)
    assert found.refusals() == [(LIAR, 0)]
