# SPDX-License-Identifier: Apache-2.0
from fedvitals.protocols import History, Sink
from fedvitals.store.memory import MemoryStore
from store_contract import StoreContract


class TestMemory(StoreContract):
    def make(self, folder):
        return MemoryStore(everything=True)

    def make_second(self, store):
        return MemoryStore(everything=True)

    def reopen(self, store):
        return store

    def history(self, store, run="r-1"):
        return store.history(run)

    def read(self, store, kind, run="r-1"):
        return store.records(run, kind)

    def run(self, store, run="r-1"):
        return store.runs[run]


def test_it_is_what_it_says():
    store = MemoryStore()
    assert isinstance(store, Sink)
    assert isinstance(store.history("r"), History)
