# SPDX-License-Identifier: Apache-2.0
"""Memory that ran out, or grows: what the findings say, on histories by hand; and the arithmetic of what would fit."""

import math

import numpy as np
import pytest

from fedvitals.diagnosis.detectors import memory_leaks as detect_memory
from fedvitals.diagnosis.detectors import system
from fedvitals.diagnosis.detectors.memory_leaks import memory_growth
from fedvitals.diagnosis.memory_fit import (
    USABLE_SHARE,
    device_table,
    largest_share,
    memory_remedies,
    predicted_peak,
    size_words,
)
from fedvitals.diagnosis.memory_forecast import Growth, forecast, growth_of
from fedvitals.lab.network.profiles import DEVICES
from fedvitals.records import Event, Metric, Where
from fedvitals.store.in_memory import MemoryStore
from support.conditions import holds_for_each
from support.histories import findings_of

MB = 1_000_000
SHARES = {"model": 40 * MB, "buffers": 0, "gradients": 40 * MB, "optimizer": 80 * MB, "activations": 640 * MB}


def test_each_remedy_brings_the_peak_under_the_limit():
    assert predicted_peak(SHARES) == 800 * MB
    assert predicted_peak(SHARES, batch=64, to_batch=32) == 480 * MB
    assert largest_share(SHARES) == ("activations", 0.8)
    remedies = {one.kind: one for one in memory_remedies(SHARES, 500 * MB, 64)}
    assert remedies["batch"].value == (0.9 * 500 - 160) // 10  # 10 MB a sample
    assert "accumulated over 3" in remedies["batch"].text
    assert remedies["half"].bytes == 440 * MB
    assert remedies["prune"].value == pytest.approx(0.44)
    assert holds_for_each(one.bytes <= USABLE_SHARE * 500 * MB for one in remedies.values())
    assert memory_remedies(SHARES, 900 * MB, 64) == []
    assert [one.kind for one in memory_remedies(SHARES, 10 * MB, 64)] == []
    assert largest_share({}) is None


def test_one_more_sample_would_not_fit():
    for limit in (300, 444, 500, 777):
        batch = next(one for one in memory_remedies(SHARES, limit * MB, 64) if one.kind == "batch")
        assert predicted_peak(SHARES, 64, batch.value) <= USABLE_SHARE * limit * MB
        assert predicted_peak(SHARES, 64, batch.value + 1) > USABLE_SHARE * limit * MB


def test_the_table_of_devices():
    devices = {name: device.memory_bytes for name, device in DEVICES.items()}
    rows = {row.device: row for row in device_table({**SHARES, "activations": 4000 * MB}, devices, 64)}
    assert rows["server"].fits
    assert not rows["server"].remedies
    assert not rows["phone"].fits
    assert rows["phone"].remedies[0].kind == "batch"


def test_sizes_for_people():
    assert [size_words(n) for n in (999, 1500, 2.5e6, 25.3e9, 1e13)] == [
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "25.3 GB",
        "10 TB",
    ]


# -- out of memory ----------------------------------------------------------------------------------------------------


def ran_out(event, limit, tried=64.0, more=()):
    store = MemoryStore()
    names = {f"memory.{name}": value for name, value in SHARES.items()}
    told = [Metric(Where("r", 0, "c1"), 1.0, name, float(value)) for name, value in names.items()]
    told += [
        Metric(Where("r", 0, "c1"), 1.0, "memory.batch", 64.0),
        Metric(Where("r", 0, "c1"), 1.0, "memory.limit", limit),
    ]
    told += [Metric(Where("r", 1, "c1"), 2.0, "memory.batch", tried), event, *more]
    for sequence, record in enumerate(told):
        object.__setattr__(record, "source", "s")
        object.__setattr__(record, "sequence", sequence)
    store.write(told)
    (found,) = [f for f in findings_of(system.DETECTORS, store.history("r"), 1) if f.where.node == "c1"]
    return found


def failed(kind, message, name="c1"):
    return Event(Where("r", 1, name), 2.0, "error", "client.failed", message, {"exception": kind} if kind else {})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MemoryError", "MemoryError: "),
        ("OutOfMemoryError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB"),
        ("RuntimeError", "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory: can't allocate"),
    ],
)
def test_running_out_names_the_largest_share_and_what_would_fit(kind, message):
    found = ran_out(failed(kind, message), 500.0 * MB)
    assert (found.issue, found.severity) == ("OUT_OF_MEMORY", "warning")
    assert found.message.startswith(f"c1 failed with {kind}.")
    assert "Activations took most: 640 MB, 80 % of a step's tensors (batch of 64)." in found.message
    assert "a batch of 29 in place of 64" in found.message
    assert "16 bits" in found.message
    assert "pruned" in found.message
    assert found.evidence["largest"] == "activations"
    assert found.evidence["remedies"]["batch"] == 29
    assert "20 MiB" not in found.message  # no words of a client's


def test_a_larger_batch_than_was_measured_is_scaled():
    found = ran_out(failed("MemoryError", "MemoryError"), 1000.0 * MB, tried=128.0)
    assert found.evidence["peak_bytes"] == 1440 * MB
    assert "1.28 GB" in found.message
    assert "a batch of 74 in place of 128" in found.message


def memory_metric(number, name, value, node="c1"):
    return Metric(Where("r", number, node), 3.0, f"memory.{name}", float(value))


def small(telemetry, resident, limit, activations=3_000):
    """A model of 5 kB, and what else there is."""
    shares = {"model": 2_000, "gradients": 2_000, "optimizer": 0, "activations": activations, "telemetry": telemetry}
    return [memory_metric(1, name, value) for name, value in {**shares, "resident": resident, "limit": limit}.items()]


def test_tensors_that_are_no_real_part_are_not_blamed():
    """30 kB of tensors, most of them ours, in a process of 480 MB that has 25 GB: neither they nor we filled it."""
    found = ran_out(failed("MemoryError", "MemoryError: "), 25e9, more=small(21_600, 480 * MB, 25e9))
    assert "Fedvitals" not in found.message
    assert "took most" not in found.message
    assert "batch" not in found.message
    assert "not in the model's tensors, which are 28.6 kB in a step; the process held 480 MB of 25 GB" in found.message
    assert "one large piece was asked for" in found.message
    assert (found.confidence, found.evidence["explained"]) == (1.0, False)
    full = ran_out(failed("MemoryError", "MemoryError: "), 500.0 * MB, more=small(21_600, 480 * MB, 500 * MB))
    assert "the process held 480 MB: look at data, caches and results" in full.message


def test_what_we_hold_is_named_only_where_it_is_most():
    """Of 30 MB in a process of 100 MB ours are 16: not a fifth. Of 60 they are 40, and that is said."""
    little = ran_out(failed("MemoryError", "MemoryError: "), 25e9, more=small(16 * MB, 100 * MB, 25e9, 14 * MB))
    assert "itself" not in little.message
    most = ran_out(failed("MemoryError", "MemoryError: "), 25e9, more=small(40 * MB, 100 * MB, 25e9, 20 * MB))
    assert "Fedvitals itself took most: 40 MB" in most.message


def test_a_process_that_was_killed_has_its_own_words():
    killed = ran_out(failed("WorkerKilled", "(its words need privacy level 3)"), 500.0 * MB)
    assert killed.issue == "OUT_OF_MEMORY"
    assert killed.message.startswith("The process of c1 was killed, as the kernel does when memory runs out.")
    assert killed.confidence == 0.8
    held = [memory_metric(1, "resident", 100 * MB)]
    assert ran_out(failed("WorkerKilled", ""), 500.0 * MB, more=held).confidence == 0.6  # others may have filled it
    counted = Metric(Where("r", 1, "server"), 2.0, "machine.oom_kills", 1.0)
    proved = ran_out(failed(None, "The worker process died (killed, or out of memory)."), 500.0 * MB, more=[counted])
    assert proved.message.startswith("The process of c1 was killed by the kernel, which had run out of memory.")
    assert proved.confidence == 1
    assert ran_out(failed("WorkerDied", "The worker process died with exit code -11."), 500.0 * MB).issue == "CRASH"


# -- leaks ------------------------------------------------------------------------------------------------------------

BASE = 400 * 2**20


def series(*steps):
    return [BASE + 2**20 * step for step in steps]


def leaking(count=24, each=3.0):
    return series(*(each * n for n in range(count)))


@pytest.mark.parametrize(
    "values",
    [
        series(*([0.0] * 30)),
        series(*(40 * math.log1p(n) for n in range(30))),  # levels off
        series(*(60 * (1 - 0.8**n) for n in range(30))),
        series(*((n % 7) * 8.0 for n in range(30))),  # garbage, collected every seven rounds
        series(*([0.0] * 12 + [50.0] * 18)),  # once
        series(*(n * 0.1 for n in range(30))),  # too little to matter
        leaking(7),  # too soon
    ],
    ids=["flat", "logarithm", "exponential", "saw-tooth", "step", "little", "soon"],
)
def test_what_levels_off_or_comes_back_does_not_grow(values):
    assert memory_growth(range(len(values)), values) is None


@pytest.mark.parametrize("tooth", [0, 20])
def test_what_does_not_level_off_grows(tooth):
    values = [value + tooth * 2**20 * (n % 4) for n, value in enumerate(leaking())]
    grown = memory_growth(range(len(values)), values)
    assert grown is not None
    assert grown.per_round == pytest.approx(3 * 2**20, rel=0.15)


def told_of(values, censuses=(), number=23):
    store = MemoryStore()
    store.write(
        [
            Metric(Where("r", n, node), float(n), name, value, f"{name} {node}", n)
            for (name, node), own in values.items()
            for n, value in enumerate(own)
        ]
    )
    store.write(
        [
            Event(Where("r", data["until"] + 1), 1.0, "info", "memory.census", "", data, "census", i)
            for i, data in enumerate(censuses)
        ]
    )
    return findings_of(detect_memory.DETECTORS, store.history("r"), number)


def counted(until, each, since=5, **changes):
    row = {"shape": [64, 10], "type": "float32", "graph": False, "count": 1000, "held_bytes": 0}
    more = each * (until - since)
    row |= {"more": more, "more_bytes": more * 30_000, **changes}
    return {"since": since, "until": until, "grown_bytes": 1, "groups": [row]}


RESIDENT = {("memory.resident", f"c{i}"): leaking() for i in range(4)}


def test_tensors_that_pile_up_are_named():
    (found,) = told_of(RESIDENT, [counted(8, 100), counted(11, 100)])
    assert (found.issue, found.where.node, found.evidence["since"]) == ("MEMORY_LEAK", None, 3)
    assert "100 more tensors of shape [64, 10] (float32) are alive after each" in found.message
    assert found.confidence > 0.9


def test_losses_with_their_graph_are_named_though_they_are_small():
    rows = [
        counted(8, 50, shape=[], graph=True, more_bytes=600),
        counted(11, 50, shape=[], graph=True, more_bytes=1200),
    ]
    (found,) = told_of(RESIDENT, rows)
    assert "50 more tensors of shape [] (float32) that hold their graph" in found.message


def seen(until, each, collections=1, **changes):
    """A census of tensors that hooks have seen."""
    data = counted(until, each, **{"kind": "output", "exact": True, **changes})
    return data | {"collections": collections, "rounds_seen": until - data["since"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "100 more outputs of shape [64, 10] (float32) are alive after each."),
        ({"exact": False, "kind": "input"}, "about 100 more inputs of shape [64, 10] (float32) are alive after each."),
        ({"graph": True, "more_bytes": 0}, "The graphs of 100 more outputs of shape [64, 10] (float32) are alive"),
    ],
)
def test_tensors_that_hooks_have_seen_are_named_by_their_kind(changes, words):
    (finding,) = told_of(RESIDENT, [seen(8, 100, **changes), seen(11, 100, **changes)])
    assert words in finding.message
    assert "gc.collect" not in finding.message
    assert finding.confidence > 0.95
    assert finding.evidence["tensors"]["kind"] == changes.get("kind", "output")


def test_tensors_that_no_collection_has_met_may_be_garbage():
    (finding,) = told_of(RESIDENT, [seen(8, 100, collections=0), seen(11, 100, collections=0)])
    assert "if `gc.collect()` frees them, they were in reference cycles" in finding.message
    assert finding.confidence == 0.9


def test_growth_outside_of_what_hooks_have_seen_is_said_to_be_so():
    grown = {("memory.resident", f"c{i}"): leaking(each=20.0) for i in range(4)}
    nothing = [seen(8, 100) | {"groups": []}, seen(11, 100) | {"groups": []}]
    (finding,) = told_of(grown, nothing)
    assert "It is outside of the tensors that fedvitals sees" in finding.message
    assert finding.confidence == 0.8
    assert told_of(RESIDENT, nothing) == []


@pytest.mark.parametrize(
    ("heaps", "expected"),
    [
        ((7.5, 15), True),
        ((None, None), False),
        ((7.5, 8), False),  # did not go on
        ((2, 4), False),  # the rest is fragmentation
        ((-3, -6), False),
        (("7", 15), False),
    ],
)
def test_less_growth_is_enough_where_the_heap_in_use_grows_as_well(heaps, expected):
    """Tensors that no hook saw: 3 MiB a round, of which the heap in use explains most or not."""
    nothing = [
        seen(until, 100)
        | {"groups": [], "heap_grown_bytes": int(heap * 2**20) if isinstance(heap, int | float) else heap}
        for until, heap in zip((8, 11), heaps, strict=True)
    ]
    findings = told_of(RESIDENT, nothing)
    assert [finding.issue for finding in findings] == ["MEMORY_LEAK"] * expected
    if expected:
        assert "It is outside of the tensors that fedvitals sees" in findings[0].message


@pytest.mark.parametrize(
    "censuses",
    [
        [],
        [counted(8, 100)],  # once may be garbage
        [counted(8, 100), counted(11, 10)],
        [counted(8, 100), counted(11, 100, more_bytes=10)],  # explains nothing
        [counted(8, 100, shape="big"), counted(11, 100, more=math.inf)],  # of a machine that lies
        [seen(8, 100, kind=["output"]), seen(11, 100, kind=["output"])],
        [counted(8, 100), seen(11, 100)],  # the heap's, and the hooks': not the same
        [{"since": "a", "until": 9, "groups": 3}, {"since": 9, "until": 8, "groups": []}],
    ],
)
def test_without_tensors_less_growth_is_no_finding(censuses):
    assert told_of(RESIDENT, censuses) == []


def test_without_tensors_a_lot_of_growth_is_one_less_sure():
    (found,) = told_of({("memory.resident", f"c{i}"): leaking(each=20.0) for i in range(4)})
    assert found.confidence < 0.9
    assert "tensors" not in found.message


def test_a_server_that_grows_by_itself_is_found_too():
    (found,) = told_of({("memory.resident", None): leaking(each=20.0), ("memory.limit", "c0"): [4 * BASE] * 24})
    assert found.where.node is None
    assert "Out of memory in about 37 rounds. 902 MB of 1.68 GB are in use." in found.message


def test_the_client_while_whose_training_it_grows_is_named():
    kept = {("memory.kept", f"c{i}"): [170_000.0 + (2_900_000 if i == 2 else 0)] * 24 for i in range(4)}
    (found,) = told_of(RESIDENT | kept, [counted(8, 100), counted(11, 100)])
    assert found.where.node == "c2"
    assert "while c2 trains" in found.message
    alike = {key: [900_000.0] * 24 for key in kept}
    (found,) = told_of(RESIDENT | alike, [counted(8, 100), counted(11, 100)])
    assert found.where.node is None


# -- when memory runs out ---------------------------------------------------------------------------------------------

GB = 2**30


def test_growth_and_its_uncertainty_hold_the_truth():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        sizes = BASE + 30 * 2**20 * np.arange(12) + 10 * 2**20 * rng.standard_normal(12)
        growth = growth_of(range(12), sizes)
        held += growth.least <= 30 * 2**20 <= growth.most
    assert held >= 170  # of 200, at 90 %


def test_a_forecast_is_worded_as_people_would():
    assert str(forecast(Growth(100.0, 70.0, 150.0), 650.0)) == "Out of memory in about 6 rounds (4 to 9)."
    assert str(forecast(Growth(100.0, -5.0, 150.0), 650.0)) == "Out of memory in about 6 rounds (4 or more)."
    assert forecast(Growth(1.0, 1.0, 1.0), 1e9) is None


def test_memory_that_does_not_grow_has_no_forecast():
    assert growth_of(range(8), [5.0] * 8) is None
    assert growth_of(range(3), [1.0, 2.0, 3.0]) is None


def test_a_leak_that_is_full_soon_is_foretold_after_few_rounds():
    sizes = [BASE + 50 * 2**20 * n for n in range(9)]
    own = {("memory.resident", None): sizes, ("memory.limit", None): [BASE + 1000.0 * 2**20]}
    (finding,) = told_of(own, number=8)
    assert finding.message.startswith("The server's memory grows by 52.4 MB a round since round")
    assert "Out of memory in about 12 rounds." in finding.message
    assert finding.evidence["forecast"]["rounds"] == 12
    far = {**own, ("memory.limit", None): [100.0 * GB]}
    assert told_of(far, number=8) == []


def test_what_a_round_needs_for_a_while_counts():
    """As an evaluation does, whose memory is free again at the round's end."""
    sizes = [BASE + 50 * 2**20 * n for n in range(9)]
    own = {("memory.resident", None): sizes, ("memory.limit", None): [BASE + 1000.0 * 2**20]}
    own["memory.peak", None] = [size + 300 * 2**20 for size in sizes]
    (finding,) = told_of(own, number=8)
    assert finding.evidence["forecast"]["rounds"] == 6
    assert finding.severity == "critical"


def test_a_client_whose_own_process_grows_is_named():
    flat = [float(BASE)] * 24
    own = {("memory.resident", f"c{i}"): flat for i in range(4)} | {("memory.resident", "c2"): leaking(each=20.0)}
    (finding,) = told_of(own)
    assert finding.where.node == "c2"
    assert finding.message.startswith("Memory of the process of c2 grows by 21 MB a round")


def test_where_memory_grows_is_said():
    grown = {("memory.resident", f"c{i}"): leaking(each=20.0) for i in range(4)}
    inside = grown | {("memory.kept", f"c{i}"): [5.0 * 2**20] * 24 for i in range(4)}
    outside = grown | {("memory.kept", f"c{i}"): [0.0] * 24 for i in range(4)}
    assert "It grows while clients train." in told_of(inside)[0].message
    assert "It grows outside of the clients' training" in told_of(outside)[0].message
