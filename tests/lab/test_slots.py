# SPDX-License-Identifier: Apache-2.0
"""Memory for the states of batches: a tape keeps updates where they arrived, and nobody writes there meanwhile."""

import pytest
import torch

from fedvitals import lab
from fedvitals.lab.corrections import ActiveCorrections
from fedvitals.lab.engines.slots import StateSlots
from fedvitals.lab.engines.tasks import Update
from fedvitals.protocols import NullObserver
from fedvitals.replay.tape.digests import digest_of


def rows_of(lease):
    return set(range(lease.first, lease.first + lease.count))


def test_leases_share_no_row_with_each_other_or_with_the_slots():
    slots = StateSlots(slots=2, rows=3, size=5)
    taken = set(range(6))
    leases = []
    while (lease := slots.lease(1)) is not None:
        assert not taken & rows_of(lease)
        taken |= rows_of(lease)
        leases.append(lease)
    assert taken == set(range(len(slots.states))) == set(range(12))


def test_rows_come_back_with_their_lease_the_last_used_ones_first():
    slots = StateSlots(slots=0, rows=4, size=5)
    leases = [slots.lease(1) for _ in range(8)]
    assert slots.lease(1) is None
    places = [leases[2].first, leases[5].first]
    del leases[5], leases[2]
    again = [slots.lease(1), slots.lease(1)]
    assert [lease.first for lease in again] == places


def test_leases_of_another_width_avoid_rows_that_are_held():
    slots = StateSlots(slots=1, rows=4, size=5)
    narrow = [slots.lease(1) for _ in range(8)]
    held = narrow[3]
    del narrow
    wide = [slots.lease(3), slots.lease(3)]
    assert all(lease is not None and not rows_of(lease) & rows_of(held) for lease in wide)
    assert not rows_of(wide[0]) & rows_of(wide[1])
    del held, wide
    assert slots.lease(8).count == 8
    assert slots.lease(9) is None


class Hoard:
    """Keeps every message, as a tape whose thread never gets a turn would."""

    def __init__(self):
        self.kept, self.digests, self.ended = [], [], 0

    def describe(self, description): ...

    def begin(self, round_index, state, notes): ...

    def messages(self, round_index, messages):
        for message in messages:
            self.kept.append(message.tensors)
            self.digests.append(digest_of(message.tensors))

    def end(self, round_index, state, notes, metrics):
        self.ended += 1

    def gate(self, round_index): ...


class Hoarding(NullObserver):
    def __init__(self):
        self.recorder = Hoard()

    def for_worker(self):
        return NullObserver()


def experiment(**changes):
    settings = {"dataset": "digits", "model": "mlp", "clients": 6, "rounds": 5, "seed": 3}
    return lab.Experiment(**{**settings, "local": lab.Local(iterations=2), **changes})


@pytest.mark.parametrize(("engine", "workers"), [("reuse", 2), ("stacked", 2), ("stacked", 1), ("reuse", 1)])
def test_what_is_kept_stays_as_it_arrived_even_when_memory_runs_out(engine, workers):
    observer = Hoarding()
    watched = lab.run(experiment(), observer, engine=engine, workers=workers)
    hoard = observer.recorder
    assert hoard.ended == 5
    assert len(hoard.kept) == 30  # spare rows are enough for 12 of them
    assert [digest_of(tensors) for tensors in hoard.kept] == hoard.digests
    assert torch.equal(watched.state, lab.run(experiment(), engine=engine, workers=workers).state)


def test_updates_are_kept_where_they_arrived():
    observer = Hoarding()
    lab.run(experiment(rounds=1), observer, engine="reuse", workers=2)
    first, second, *_ = (tensors.flat for tensors in observer.recorder.kept)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()  # the workers' shared memory


def test_a_limited_norm_changes_what_is_averaged_and_not_what_is_kept():
    start, state = torch.zeros(4), torch.tensor([3.0, 4.0, 7.0, 9.0])
    update = Update("c0", state, start, 1)
    update.arrived = (state, object())
    assert update.lease is not None
    ActiveCorrections(max_update_norm=1.0).adjust_update(update, start, 2)
    torch.testing.assert_close(update.state, torch.tensor([0.6, 0.8, 7.0, 9.0]))
    assert state.tolist() == [3.0, 4.0, 7.0, 9.0]
    assert update.lease is None


class Overwriting(lab.Centralized, frozen=True):
    """A user's own topology, which writes into the states that it has received."""

    def round(self, federation):
        def spoiled(updates):
            for update in updates:
                update.state *= 0.5
                yield update

        tasks = [lab.Task(federation.round, (node,), federation.server.model) for node in federation.cohort()]
        return federation.aggregate(spoiled(federation.train(tasks)))


def test_a_users_own_topology_may_write_into_states():
    observer = Hoarding()
    lab.run(experiment(topology=Overwriting()), observer, engine="reuse", workers=1)
    hoard = observer.recorder
    assert [digest_of(tensors) for tensors in hoard.kept] == hoard.digests
