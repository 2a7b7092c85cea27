# SPDX-License-Identifier: Apache-2.0
"""Records of senders get identities without gaps and never twice, in bounded memory."""

from fedvitals.records import Metric, Where
from fedvitals.store import SqliteStore, deliveries
from fedvitals.transport.sink_writer import SenderSources


def test_a_sender_that_was_forgotten_gets_another_source():
    sources, given = SenderSources(most=3), []
    for turn in range(20):
        given += [sources.next_identity(f"sender/c{(turn * step) % 7}") for step in range(1, 7)]
        assert len(sources._sources) <= 3
    assert len({*given}) == len(given)
    by_source = {}
    for source, sequence in given:
        assert sequence == by_source.get(source, -1) + 1
        by_source[source] = sequence


def test_a_store_knows_a_source_that_its_writer_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(deliveries, "SOURCES_REMEMBERED", 3)
    records = [Metric(Where("r", 1, f"c{i % 9}"), 0.0, "loss", 1.0, f"s{i % 9}", i // 9) for i in range(90)]
    with SqliteStore(tmp_path / "runs.db") as store:
        for record in [*records, *records]:
            store.write([record])
        assert len(store._writer._delivered._intervals) <= 3
        assert store._database.rows("SELECT COUNT(*) FROM metric") == [(90,)]
