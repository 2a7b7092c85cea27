# SPDX-License-Identifier: Apache-2.0
"""Compressed updates: rules that compare them with training abstain and say so, and hard faults are still found."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.abstentions import abstentions
from fedvitals.diagnosis.cases import cases, is_trouble
from fedvitals.diagnosis.evidence.faulty_clients import verdicts
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import MISMATCH_LIMIT
from fedvitals.diagnosis.examine import examine
from fedvitals.records import Action, Finding
from fedvitals.store import MemoryStore, open_reader
from fedvitals.store.read import queries
from support import verbs
from support.healthy.loops import HAND_COMPRESSIONS, compressed_loop
from support.healthy.settings import LAB_COMPRESSIONS, judged, lab_setting, troubles
from support.histories import history_of

CULPRIT = "c3"
NODES = [f"c{i}" for i in range(8)]


def accused(cases):
    return {(case.issue, case.node) for case in cases if is_trouble(case)}


@pytest.mark.thorough
@pytest.mark.parametrize("compression", LAB_COMPRESSIONS)
@pytest.mark.parametrize(
    ("fault", "issue"),
    [
        (lab.NotFinite(nodes=[CULPRIT], since=4, layer=0), "NAN_GRADIENT"),
        (lab.Scaling(nodes=[CULPRIT], since=4, factor=100.0), "BYZANTINE"),
        (lab.FrozenLayer(nodes=[CULPRIT], since=4, layer=-1), "FROZEN_LAYER"),
        (lab.Crash(nodes=[CULPRIT], since=4), "CRASH"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hard_faults_are_found_in_compressed_runs(compression, fault, issue):
    run = functools.partial(lab_setting, faults=(fault,), rounds=8, compression=LAB_COMPRESSIONS[compression])
    found = judged(run, seed=2)
    assert (issue, CULPRIT) in accused(found)
    assert {node for _, node in accused(found)} <= {CULPRIT, None}


@pytest.mark.thorough
@pytest.mark.parametrize("compression", HAND_COMPRESSIONS)
@pytest.mark.parametrize(("factor", "issue"), [(float("nan"), "NAN_UPDATE"), (100.0, "BYZANTINE")])
def test_hard_faults_are_found_in_loops_that_compress_by_hand(compression, factor, issue):
    def spoil(number, node, change):
        return change * factor if node == CULPRIT and number >= 4 else change

    run = functools.partial(compressed_loop, compress=HAND_COMPRESSIONS[compression], spoil=spoil)
    found = judged(run, seed=1)
    assert (issue, CULPRIT) in accused(found)
    assert {node for _, node in accused(found)} <= {CULPRIT, None}


@pytest.mark.thorough
@pytest.mark.parametrize("attackers", [1, 3])
def test_a_minority_that_alters_its_updates_is_found_and_silences_nobody(attackers):
    """Mostly zeros, in an honest run: it is the transport's doing only where most clients show it."""
    wrong = [f"c{i}" for i in range(attackers)]

    def spoil(number, node, change):
        if node not in wrong or number < 4:
            return change
        kept = change.abs() >= change.abs().topk(len(change) // 20).values[-1]
        return change * kept * 5

    found = judged(functools.partial(compressed_loop, compress=lambda change, _: change, spoil=spoil))
    assert {node for _, node in accused(found)} >= set(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16], ids=str)
def test_a_minority_that_only_rounds_its_updates_is_accused_of_nothing(precision):
    """Two clients send half precision, the others what they trained; and another one does so at times."""

    def spoil(number, node, change):
        rounds = node in NODES[:2] or node == NODES[number % len(NODES)]
        return change.to(precision).float() if rounds else change

    found = judged(functools.partial(compressed_loop, compress=lambda change, _: change, spoil=spoil))
    assert accused(found) == set()


@pytest.mark.thorough
def test_how_far_an_update_is_from_the_trained_one_is_told():
    store = MemoryStore()
    factors = {NODES[1]: -1.0, NODES[2]: 100.0}

    def spoil(number, node, change):
        return change.bfloat16().float() if node == NODES[0] else change * factors.get(node, 1.0)

    with fv.Monitor(None, sinks=[store], machine=False, detectors=()) as monitor:
        compressed_loop(monitor, 0, compress=lambda change, _: change, spoil=spoil)
    told = store.history(monitor.run.id).latest("update.differs", 0)
    assert set(told) == set(NODES[:3])
    assert told[NODES[0]] < MISMATCH_LIMIT
    assert 10 * MISMATCH_LIMIT < min(told[NODES[1]], told[NODES[2]]) <= 1.0


def shown(distances, known=NODES):
    """A round in which these clients' updates are larger than trained by a share, and only `known` tell of training."""
    values = {("update.norm", node): [1.0 + distances.get(node, 0.0)] for node in NODES}
    return history_of(values | {("weight.drift", node): [1.0] for node in known})


def test_only_a_majority_counts():
    half = dict.fromkeys(NODES[:4], 0.3)
    assert transformation(shown({}), 0) is None
    assert transformation(shown(half), 0) is None
    assert transformation(shown(half | {NODES[4]: 0.3}), 0) is not None
    assert transformation(shown(half, known=NODES[:2]), 0) is None  # two attackers, whose telemetry alone arrives
    assert transformation(shown(dict.fromkeys(NODES, 1e-7)), 0) is None  # sums in another order
    assert transformation(shown(dict.fromkeys(NODES, 3e-4)), 0) is not None  # half precision


def test_a_small_cohort_is_judged_with_the_clients_of_the_rounds_before():
    """One honest and two altered updates in this round; in the rounds before, nearly all were honest."""
    norms = {("update.norm", node): [1.0, None, None] for node in NODES}
    drift = {("weight.drift", node): [1.0, None, None] for node in NODES}
    for node, distance in ((NODES[0], 0.5), (NODES[1], 0.5), (NODES[2], 0.0)):
        norms["update.norm", node] = [1.0, None, 1.0 + distance]
        drift["weight.drift", node] = [1.0, None, 1.0]
    assert transformation(history_of(norms | drift), 2) is None


def compressed_store(path, **options):
    with fv.Monitor(path, "compressed", machine=False, **options) as monitor:
        lab_setting(monitor, 0, rounds=6, clients=8, compression=lab.int8())
        return monitor.run.id


@pytest.mark.thorough
def test_every_front_end_says_what_is_not_judged(tmp_path, capsys):
    run = compressed_store(tmp_path / "runs.db")
    for verb, judges in (("findings", 1), ("show", 0), ("check", 1)):
        code, out, _ = verbs.run(capsys, verb, run, "--store", tmp_path / "runs.db")
        assert code == judges, out
        assert "none of the 48 client-rounds was fully judged, because updates are compressed" in out, out
    with open_reader(tmp_path / "runs.db") as reader:
        history = reader.history(run)
        assert [*queries.records(reader, run, Finding)] == []
        assert set(verdicts(history, 5).values()) == {"not judged"}
        assert [*queries.records(reader, run, Action)] == []


@pytest.mark.thorough
def test_a_run_that_is_compressed_only_at_times_is_judged_the_rest_of_the_time():
    store = MemoryStore()
    with fv.Monitor(None, sinks=[store], machine=False, detectors=()) as monitor:
        number = iter(range(1000))

        def sometimes(change, _):
            return change.half().float() if next(number) // 10 in (3, 4, 5) else change

        compressed_loop(monitor, 0, compress=sometimes)
    history = store.history(monitor.run.id)
    rounds = [number for number in history.rounds() if abstentions(history, number)]
    assert rounds == [3, 4, 5]
    assert troubles(cases(examine(history))) == []


def batch_norm_loop(tmp_path, change):
    """Six clients of a model with batch norm, of which the host hands over whole state dicts, buffers included."""
    torch.manual_seed(0)
    centres = torch.randn(4, 1, 8, 8)
    labels = [torch.randint(4, (80,)) for _ in range(6)]
    data = [(centres[y] + 0.7 * torch.randn(80, 1, 8, 8), y) for y in labels]
    shared = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))
    with fv.Monitor(tmp_path / "bn.db", machine=False) as monitor:
        for number in range(8):
            before = {key: value.clone() for key, value in shared.state_dict().items()}
            updates = {}
            with monitor.round(number, shared):
                for index, (x, y) in enumerate(data):
                    model = copy.deepcopy(shared)
                    optimizer = torch.optim.SGD(model.parameters(), 0.05)
                    with monitor.client(f"c{index}", model):
                        for _ in range(4):
                            optimizer.zero_grad()
                            functional.cross_entropy(model(x), y).backward()
                            optimizer.step()
                    after = model.state_dict()
                    updates[f"c{index}"] = [change(index, (after[key] - before[key]).float()) for key in before]
                monitor.updates(number, updates)
                means = [torch.stack([own[i] for own in updates.values()]).mean(0) for i in range(len(before))]
                shared.load_state_dict(
                    {key: before[key] + mean.to(before[key].dtype) for key, mean in zip(before, means, strict=True)}
                )
        return monitor.findings()


@pytest.mark.thorough
def test_running_statistics_that_travel_are_no_transformation(tmp_path):
    findings = batch_norm_loop(tmp_path, lambda index, value: value)
    assert not [f for f in findings if f.severity != "note"]
    assert findings.gaps == ()


@pytest.mark.thorough
def test_a_turned_update_beside_running_statistics_is_found(tmp_path):
    findings = batch_norm_loop(tmp_path, lambda index, value: -value if index == 3 else value)
    accused = {f.where.node for f in findings if f.severity != "note" and f.where.node}
    assert accused == {"c3"}
    assert findings.gaps == ()
