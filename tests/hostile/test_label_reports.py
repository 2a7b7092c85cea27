# SPDX-License-Identifier: Apache-2.0
"""One client that invents labels: it decides neither which classes are common nor whether there are classes at all."""

import pytest

from fedvitals.diagnosis.evidence.label_counts import predicts_texts
from fedvitals.records import Event, Finding, Metric, Run, Where
from fedvitals.store.in_memory import MemoryStore
from support.hostile_federation import LIAR, THERE, federation

NAMES = tuple(f"honest{i}" for i in range(8))
MANY = 1 << 39


def labels(node, histogram):
    return Event(Where(THERE, None, node), 1.0, "info", "labels", "", {"histogram": histogram})


def missing(monkeypatch, claims, histogram_of):
    """Who is reported to lack classes, if the liar claims these labels."""
    monkeypatch.setattr("support.hostile_federation.HONEST", NAMES)
    now = 0

    def brings(node):
        return [labels(node, histogram_of(NAMES.index(node)))] if now == 0 else []

    with federation(lambda number: [labels(LIAR, claims)] if number == 0 else [], brings=brings, privacy=3) as found:
        for now in range(3):
            found.round(now)
    return {f.where.node for f in found.sink.of(Finding, "MISSING_CLASSES")}


CLAIMS = [
    {"77": MANY},
    {"0": MANY},
    {"0": MANY, "1": 5},
    {str(i): MANY for i in range(5)},
    {str(i): 1 for i in range(9000)},
]


@pytest.mark.parametrize("claims", CLAIMS, ids=range(len(CLAIMS)))
def test_a_client_without_a_class_is_named_whatever_another_claims(monkeypatch, claims):
    lacking = missing(monkeypatch, claims, lambda i: {str(k): 50 for k in range(5) if (i, k) != (2, 3)})
    assert lacking - {LIAR} == {"honest2"}


@pytest.mark.parametrize("claims", CLAIMS, ids=range(len(CLAIMS)))
def test_clients_whose_labels_differ_anyway_are_not_named_because_one_claims_to_have_many(monkeypatch, claims):
    unlike = missing(
        monkeypatch, claims, lambda i: {str(k): 20 + 16 * ((7 * k + 3 * i) % 5) for k in range(9) if (i, k) != (2, 0)}
    )
    assert unlike <= {LIAR}


def test_clients_that_read_texts_do_so_whatever_one_says_of_labels():
    store = MemoryStore()
    places = [Where("r", 0, node) for node in (LIAR, *NAMES)]
    store.write([Run("r", "r"), *(Metric(where, 1.0, "tokens", 100.0, "m", i) for i, where in enumerate(places))])
    store.write([Event(places[0], 1.0, "info", "labels", "", {"histogram": {"0": 5, "1": 5}}, "m", 20)])
    assert predicts_texts(store.history("r"), 0)
    for number, where in enumerate(places[1:5]):
        store.write([Event(where, 1.0, "info", "labels", "", {"histogram": {"0": 5, "1": 5}}, "m", 30 + number)])
    assert not predicts_texts(store.history("r"), 0)
