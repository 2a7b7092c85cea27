# SPDX-License-Identifier: Apache-2.0
"""What averaging does to the whole, each fault named; natural differences of size and data are not."""

from dataclasses import replace

import numpy as np
import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.aggregation import DETECTORS, weight_explosion
from fedvitals.records import Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.stats import MAX, MIN, empty_sums
from fedvitals.store import MemoryStore
from support.histories import history_of
from support.lab.examined import CULPRIT, ONSET, findings_by, first_rounds, watched

ILL = {"nodes": CULPRIT, "since": ONSET}


@pytest.mark.thorough
@pytest.mark.parametrize("since", [0, ONSET])
@pytest.mark.parametrize("partition", [lab.iid(), lab.dirichlet(0.3)])
def test_a_client_with_thirty_times_the_samples_dominates(since, partition):
    fault = lab.dominant_client(factor=30, nodes=CULPRIT, since=since)
    findings = findings_by(watched(fault, rounds=5, partition=partition), DETECTORS)
    assert first_rounds(findings) == {("DOMINANT_CLIENT", "c3"): since}
    assert {finding.severity for finding in findings} == {"warning"}  # since most of its samples are repeated


def test_a_false_claim_is_not_dominance():
    assert findings_by(watched(lab.wrong_sample_count(factor=30.0, **ILL), rounds=5), DETECTORS) == []


def test_clients_whose_data_turned_are_left_behind():
    fault = lab.group_left_behind(nodes=["c3", "c6"], since=6, share=0.9)
    local = lab.Local(iterations=15, optimizer=lab.sgd(learning_rate=0.3))
    findings = findings_by(watched(fault, rounds=12, clients=10, local=local), DETECTORS)
    assert set(first_rounds(findings)) == {("GROUP_LEFT_BEHIND", None)}
    assert 6 <= findings[0].where.round <= 6 + 4
    assert {s.node for s in findings[-1].suspects} == {"c3", "c6"}


def written(norms, losses):
    told = [("weight.norm", "server", n, v) for n, v in enumerate(norms)]
    told += [("loss", None, n, v) for n, v in enumerate(losses)]
    store = MemoryStore()
    store.write([Metric(Where("r", n, node), 1.0, name, v, "s", i) for i, (name, node, n, v) in enumerate(told)])
    return store.history("r")


def test_weights_that_grow_by_a_factor_explode():
    growing = [10.0 * 1.6**n for n in range(6)]
    assert first_rounds(findings_by(written(growing, [2.0] * 6), DETECTORS)) == {("WEIGHT_EXPLOSION", None): 4}
    assert (
        findings_by(written(growing, [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]), DETECTORS) == []
    )  # it learns: they began too small
    assert findings_by(written([10.0 + n for n in range(6)], [2.0] * 6), DETECTORS) == []


def running(variances, least=0.1, server=None):
    """Six clients' running variances of two layers, the largest as given; `server`: the least of the global model's, a
    round before.
    """
    table = LayerTable("buffer", tuple(Layer(f"norm{i}.running_var", (4,), "float32") for i in range(2)))
    store = MemoryStore()
    records = [Run("r", "r", tables=(table,), source="s", sequence=0)]
    for i, largest in enumerate(variances):
        matrix = empty_sums(2)
        matrix[:, 0], matrix[:, 1], matrix[:, 2] = 4, largest, largest**2
        matrix[:, MIN], matrix[:, MAX] = (least if i == 3 else 0.1), largest
        records.append(LayerStats(Where("r", 0, f"c{i}"), 1.0, "buffer", matrix, table.digest, "s", 2 * i + 1))
        records.append(Metric(Where("r", 0, f"c{i}"), 1.0, "steps", 5.0, "s", 2 * i + 2))
    if server is not None:
        matrix = empty_sums(2)
        matrix[:, 0], matrix[:, 1], matrix[:, 2], matrix[:, MIN], matrix[:, MAX] = 4, 1, 1, server, 1
        records = [*records[:1], *(replace(r, where=replace(r.where, round=1)) for r in records[1:])]
        records.append(LayerStats(Where("r", 0, "server"), 1.0, "buffer", matrix, table.digest, "s", 99))
    store.write(records)
    return store.history("r")


def test_clients_that_were_sent_a_broken_model_are_not_reported_for_it():
    spread = list(np.linspace(1.0, 5.0, 6))
    sent = first_rounds(findings_by(running(spread, least=-1.0, server=0.1), DETECTORS))
    assert sent == {("BATCH_NORM_STATISTICS", "c3"): 1}
    broken = first_rounds(findings_by(running(spread, least=-1.0, server=-1.0), DETECTORS))
    assert broken == {("BATCH_NORM_STATISTICS", None): 0}


def test_running_variances_far_from_the_peers_or_negative():
    spread = list(np.linspace(1.0, 5.0, 6))
    assert findings_by(running(spread), DETECTORS) == []
    wide = [*spread[:3], 3000.0, *spread[4:]]
    assert first_rounds(findings_by(running(wide), DETECTORS)) == {("BATCH_NORM_STATISTICS", "c3"): 0}
    assert first_rounds(findings_by(running(spread, least=-1.0), DETECTORS)) == {("BATCH_NORM_STATISTICS", "c3"): 0}


@pytest.mark.slow
def test_a_broken_batch_norm_of_the_lab():
    model = lab.resnet18(norm="batch")
    fault = lab.broken_batch_norm(nodes=CULPRIT, since=1)
    history = watched(fault, model=model, clients=5, rounds=2, local=lab.Local(iterations=2))
    assert first_rounds(findings_by(history, DETECTORS)) == {("BATCH_NORM_STATISTICS", "c3"): 1}


def test_weights_that_grow_while_the_clients_losses_fall_are_no_explosion():
    """Targets of 10,000: weights must grow, and nobody logs a loss of the whole."""
    values = {("weight.norm", "server"): [2.0**n for n in range(8)]}
    values |= {("fit.loss_before", f"c{i}"): [1e8 * 0.8**n for n in range(8)] for i in range(3)}
    assert list(weight_explosion(history_of(values), 7)) == []
    values |= {("fit.loss_before", f"c{i}"): [1e8 * 1.2**n for n in range(8)] for i in range(3)}
    assert [finding.issue for finding in weight_explosion(history_of(values), 7)] == ["WEIGHT_EXPLOSION"]
