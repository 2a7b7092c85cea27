# SPDX-License-Identifier: Apache-2.0
"""Generated attacks, a few of each kind; `python -m fedvitals_studies.hostile` sends a million."""

import pytest

import fedvitals as fv
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from fedvitals_studies.hostile.federation import HOSTILE, changed_verdicts, federate, findings_about_hostile
from fedvitals_studies.hostile.hosts import FlowerHost, OtlpHost, PlainHost
from fedvitals_studies.hostile.payloads import attack_host
from fedvitals_studies.hostile.telemetry import ATTACKS, Attacker
from support.hostile_federation import HONEST, LIAR, THERE, measured, model, payload

ROUNDS = 5
QUICK = [kind for kind in ATTACKS if kind != "flooding"]


@pytest.fixture(scope="module")
def honest():
    return federate(seed=1, rounds=ROUNDS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ATTACKS)
def test_hostile_telemetry_of_one_client_changes_nothing_that_is_said_of_others(kind, honest):
    hostile = federate(seed=1, kind=kind, rounds=ROUNDS)
    assert honest.verdicts, "another client is ill"
    assert not changed_verdicts(honest, hostile)
    assert (hostile.rounds, hostile.errors) == (ROUNDS, [])
    assert hostile.refused <= {HOSTILE}
    assert findings_about_hostile(honest, hostile), "it is named"


@pytest.mark.thorough
@pytest.mark.parametrize("host_of", [PlainHost, FlowerHost, OtlpHost])
def test_a_host_survives_hostile_payloads_and_hears_the_honest_clients(host_of):
    with host_of() as host:
        counts = attack_host(host, 100, seed=4)
    assert counts.count >= 100
    assert not counts.failures
    assert counts.refusals


def test_attacks_are_repeated_by_their_seed():
    attackers = [Attacker(LIAR, HONEST, THERE, seed=5) for _ in range(2)]
    own = payload(measured(LIAR, 0), "own")
    first, second = ([attacker.attack(own).kind for _ in range(50)] for attacker in attackers)
    assert first == second
    assert len({*first}) > 5


@pytest.mark.parametrize("kind", [*QUICK, pytest.param("flooding", marks=pytest.mark.thorough)])
def test_no_attack_costs_another_client_anything(kind):
    """Many attacks in a round; what honest clients tell arrives, and no step of the monitor fails."""
    sink, network = MemorySink(), model()
    attacker = Attacker(LIAR, HONEST, THERE, seed=2)
    with fv.Monitor(None, sinks=[sink], machine=False, privacy=3) as monitor:
        for number in range(3):
            monitor.host.round_begin(number, network)
            for attempt in range(8):
                attack = attacker.attack(payload(measured(LIAR, number), f"own-{number}-{attempt}"), kind)
                for message in attack.messages:
                    monitor.host.absorb(message, Sender(LIAR, THERE))
            for node in HONEST:
                own = payload(measured(node, number), f"{node}-{number}")
                attacker.captured.append(own)
                monitor.host.absorb(own, Sender(node, THERE))
            monitor.host.round_end(number, network)
    for node in HONEST:
        assert [m.where.round for m in sink.metrics("loss", node=node)] == [0, 1, 2]
        assert not sink.events("telemetry.refused", node=node)
    assert not sink.events("monitor.error")
    assert len([r for r in sink.records if r.source.startswith(f"sender/{LIAR}")]) <= 3 * 5_000
