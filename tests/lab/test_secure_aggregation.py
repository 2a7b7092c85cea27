# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: the sum of masked messages is exactly the sum of what they hold, and none tells its own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.averages import AggregationError
from fedvitals.lab.secure_aggregation import PRIME, MaskedRound, SecureAggregation, recover_secret
from support.lab.by_hand import Watcher, experiment, run

NODES = [f"c{i}" for i in range(6)]


def integers(bits, size=200):
    stream = torch.Generator().manual_seed(bits)
    bound = 2 ** (bits - 1) // len(NODES)
    return {node: torch.randint(-bound + 1, bound, (size,), generator=stream) for node in NODES}


# -- the protocol -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 32, 33, 62])
@pytest.mark.parametrize("dropped", [(), ("c0",), ("c2", "c5")])
def test_sum_of_masked_messages_is_the_sum_of_the_plain_ones_to_the_last_bit(bits, dropped):
    protocol = MaskedRound(SecureAggregation(bits=bits), NODES, seed=4, round_index=2)
    plain, left = integers(bits), [node for node in NODES if node not in dropped]
    total = sum(protocol.mask(node, plain[node]) for node in left[:1])
    for node in left[1:]:
        total = (total + protocol.mask(node, plain[node])) % 2**bits
    assert torch.equal(protocol.unmask(total, left), sum(plain[node] for node in left))


def test_without_recovery_the_sum_of_those_who_are_left_is_noise():
    protocol = MaskedRound(SecureAggregation(), NODES, seed=4, round_index=2)
    plain = integers(32)
    total = sum(protocol.mask(node, plain[node]) for node in NODES[1:]) % 2**32
    assert not torch.equal(total, sum(plain[node] for node in NODES[1:]) % 2**32)


def test_single_messages_look_uniform():
    """χ² of 16 bins with 15 degrees of freedom: 37.7 is exceeded once in a thousand times; the seed is fixed."""
    protocol = MaskedRound(SecureAggregation(), NODES, seed=1, round_index=0)
    size = 16_000
    for node in NODES:
        message = protocol.mask(node, torch.zeros(size, dtype=torch.int64))
        assert int(message.min()) >= 0
        assert int(message.max()) < 2**32
        counts = torch.bincount(message >> 28, minlength=16).double()
        assert float(((counts - size / 16) ** 2 / (size / 16)).sum()) < 37.7
        low = torch.bincount(message & 15, minlength=16).double()
        assert float(((low - size / 16) ** 2 / (size / 16)).sum()) < 37.7


def test_messages_of_two_rounds_and_of_two_clients_share_nothing():
    zeros = torch.zeros(5000, dtype=torch.int64)
    rounds = [MaskedRound(SecureAggregation(), NODES, seed=1, round_index=index) for index in (0, 1)]
    sent = [protocol.mask(node, zeros).double() for protocol in rounds for node in ("c0", "c1")]
    correlations = torch.corrcoef(torch.stack(sent))
    assert float((correlations - torch.eye(4)).abs().max()) < 4 / math.sqrt(5000)


def test_secret_is_recovered_from_enough_shares_and_from_no_fewer():
    protocol = MaskedRound(SecureAggregation(threshold=0.5), NODES, seed=4, round_index=0)  # 3 of 6
    shares = protocol.share("c1")
    assert "c1" not in shares
    for three in itertools.combinations(shares.values(), 3):
        assert recover_secret(three) == protocol._secret["c1"]
    for two in itertools.combinations(shares.values(), 2):
        assert recover_secret(two) != protocol._secret["c1"]


def test_shamir_by_hand():
    """7 + 2x + 3x² at 1, 2 and 3 is 12, 23 and 40."""
    assert recover_secret([(1, 12), (2, 23), (3, 40)]) == 7
    assert recover_secret([(1, PRIME - 1), (2, PRIME - 2)]) == 0


def test_both_of_a_pair_agree_on_their_mask():
    protocol = MaskedRound(SecureAggregation(), ["c0", "c1"], seed=9, round_index=0)
    first, second = (protocol.mask(node, torch.zeros(50, dtype=torch.int64)) for node in ("c0", "c1"))
    assert torch.equal((first + second) % 2**32, torch.zeros(50, dtype=torch.int64))
    assert first.any()


def test_too_few_left():
    protocol = MaskedRound(SecureAggregation(), NODES, seed=4, round_index=0)
    with pytest.raises(AggregationError, match="Of 6 clients asked, 3 are left, and secure aggregation needs 4"):
        protocol.unmask(torch.zeros(3, dtype=torch.int64), NODES[:3])
    assert [SecureAggregation(threshold=t).fewest(10) for t in (0.01, 0.2, 0.7, 1.0)] == [2, 2, 7, 10]


def test_fixed_point_by_hand():
    """8 bits hold up to 127; with a total weight of 12, ± 10 levels: steps of a tenth of the limit."""
    settings = SecureAggregation(bits=8, limit=2.0)
    assert settings.levels(12) == 10
    change = torch.tensor([0.2, -0.39, 5.0, -math.inf, math.nan, 0.09])
    assert settings.quantise(change, 12).tolist() == [1, -2, 10, -10, 0, 0]
    protocol = MaskedRound(settings, ["c0", "c1"], seed=0, round_index=0)
    mean = protocol.mean({"c0": torch.tensor([2.0, -0.2]), "c1": torch.tensor([2.0, 1.0])}, {"c0": 9, "c1": 3})
    torch.testing.assert_close(mean, torch.tensor([2.0, 0.1], dtype=torch.float64))  # (9 · −1 + 3 · 5) / 12 tenths of 2
    assert settings.message_bytes(10) == 10


# -- in a federation --------------------------------------------------------------------------------------------------


class Server(Watcher):
    def updates(self, *_):
        raise AssertionError("the server has no single update to show")


def test_federation_learns_the_same_up_to_a_step_and_shows_nobody():
    watcher = Server()
    e = experiment(secure_aggregation=SecureAggregation())
    got = run(e, watcher)
    torch.testing.assert_close(got, run(experiment()), atol=1e-6, rtol=0)
    assert {name for name, _, _ in watcher.told} == {"updates.transformed"}
    size = len(got)
    assert {one[2] for one in watcher.transfers[0] if one[3] == "update"} == {4 * size}
    assert torch.equal(run(e), got)  # nobody watches


@pytest.mark.parametrize("aggregator", ["fedavgm", "fedadam"])
def test_other_means(aggregator):
    secure = run(experiment(secure_aggregation=SecureAggregation(bits=48), aggregator=aggregator))
    torch.testing.assert_close(secure, run(experiment(aggregator=aggregator)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", [lab.crash(nodes=["c1", "c4"]), lab.drop_out(nodes=["c1", "c4"], rate=1.0)])
def test_who_drops_out_is_left_out_and_the_rest_is_exact(fault):
    watcher = Server()
    got = run(experiment(secure_aggregation=SecureAggregation(), faults=[fault]), watcher)
    torch.testing.assert_close(got, run(experiment(faults=[fault])), atol=1e-6, rtol=0)
    assert not [name for name, _, _ in watcher.told if "aggregation" in name]


def test_below_the_threshold_the_model_stays():
    watcher, lost = Server(), [f"c{i}" for i in range(4)]
    e = experiment(secure_aggregation=SecureAggregation(), faults=[lab.crash(nodes=lost, since=1, until=1)], rounds=3)
    states = [result.state.clone() for result in lab.rounds(e, watcher, engine="sequential")]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])
    failed = [name for name, _, _ in watcher.told if "aggregation" in name]
    assert failed == ["secure_aggregation.failed", "aggregation.failed"]


def test_a_malicious_client_sends_what_it_likes_up_to_the_limit():
    liar = {"faults": [lab.scaling(nodes=["c1"], factor=1e6)], "rounds": 1}
    secure = run(experiment(**liar, secure_aggregation=SecureAggregation(limit=0.5)))
    healthy = run(experiment(rounds=1))
    assert 0.01 < float((secure - healthy).abs().max()) <= 1.0


def test_quarantine_is_by_name_and_works_on():
    """Who is left out by the server is one who dropped out: its masks are removed."""
    from fedvitals.lab.corrections import ActiveCorrections
    from fedvitals.lab.engines.engine import Engine
    from fedvitals.lab.federation import Federation, ServerState
    from fedvitals.protocols import NullObserver

    def after(**more):
        site = lab.Site.of(experiment(**more))
        with Engine(site, "sequential") as engine:
            federation = Federation(site, engine, NullObserver(), ServerState(site.layout.flat(site.module)))
            federation.corrections = ActiveCorrections(quarantined={"c3"}, factors={"c2": 0.5})
            return federation.experiment.topology.round(federation)

    torch.testing.assert_close(after(secure_aggregation=SecureAggregation()), after(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"aggregator": "median"}, "the aggregator median needs more"),
        ({"aggregator": "majority_vote"}, "the aggregator majority_vote needs more"),
        ({"topology": "rings"}, "needs the topology centralized"),
        ({"topology": lab.Asynchronous(buffer=3), "network": lab.Network()}, "with asynchronous, single models"),
        ({"compression": "int8"}, "cannot be compressed"),
        ({"privacy": "central_dp"}, "Use client_dp"),
        ({"clients": 1}, "2 or more, for a sum"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, says):
    with pytest.raises(ConfigError) as refused:
        experiment(**{"secure_aggregation": SecureAggregation(), **changes})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [lambda: SecureAggregation(bits=63), lambda: SecureAggregation(limit=0), lambda: SecureAggregation(threshold=1.1)],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ConfigError, match="cannot be"):
        make()


def test_in_toml():
    e = lab.read("[secure_aggregation]\nbits = 24\n")
    assert e.secure_aggregation == SecureAggregation(bits=24)
    assert lab.read(e.to_toml()) == e
    assert lab.read("[secure_aggregation]").secure_aggregation == SecureAggregation()


def test_a_limit_that_cuts_values_off_is_reported_once():
    events = {}
    for limit in (1e-4, 10.0):
        watcher = Watcher()
        run(experiment(secure_aggregation=lab.SecureAggregation(limit=limit)), watcher)
        events[limit] = [event for event in watcher.told if event[0] == "secure_aggregation.cut"]
    assert len(events[1e-4]) == 1
    assert events[10.0] == []
