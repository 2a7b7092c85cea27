# SPDX-License-Identifier: Apache-2.0
"""What leaves a client at which privacy level. Canaries: planted words and numbers that must, or must not, get out."""

import contextlib
import functools
import logging
import re
import struct
import threading

import numpy as np
import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.catalog import CATALOG, LEVELS
from fedvitals.probes.session import ClientSession
from fedvitals.records import Action, Event, Finding, LayerStats, Metric, Run, Sketch, Snapshot, Span, Where
from fedvitals.scope import Scope, current
from fedvitals.stats import FAMILIES
from fedvitals.testing import MemorySink, examples_of_records
from fedvitals.transport.privacy import LEFT, PrivacyPolicy, released
from fedvitals.transport.sink_writer import SinkWriter
from fedvitals.transport.spill import to_json
from support.conditions import holds_for_each
from support.models import train, watched
from support.sinks import Keeping
from support.waiting import PATIENCE

LEVEL = range(5)
PRESETS = ("light", "standard", "deep")

# -- the claim --------------------------------------------------------------------------------------------------------

CLAIM = {
    0: {
        "bottleneck.aggregation", "bottleneck.compute", "bottleneck.data_loading", "bottleneck.download",
        "bottleneck.server", "bottleneck.straggler", "bottleneck.upload", "clients", "clients.failed", "gpu.memory",
        "gpu.utilisation", "machine.cpu", "machine.disk_read", "machine.disk_written", "machine.memory",
        "machine.memory_free", "machine.oom_kills", "machine.received", "machine.sent", "memory.activations",
        "memory.batch", "memory.buffers", "memory.cuda_allocated", "memory.cuda_reserved", "memory.gradients",
        "memory.growth", "memory.kept", "memory.limit", "memory.model", "memory.optimizer", "memory.peak",
        "memory.resident", "memory.telemetry", "memory.tensors", "monitor.alive", "monitor.cost", "monitor.lost",
        "monitor.thinned",
        "diagnosis.client_rounds", "diagnosis.not_judged", "diagnosis.not_judged.few_clients",
        "diagnosis.not_judged.few_samples", "diagnosis.not_judged.different_classes",
        "diagnosis.not_judged.masked", "diagnosis.not_judged.transformed", "diagnosis.not_judged.unmeasured",
        "diagnosis.not_judged.unseen",
        "privacy.epsilon", "process.cpu",
        "process.resident", "steps", "steps.skipped", "time.aggregate", "time.client", "time.client_evaluate",
        "time.client_virtual",
        "time.clock_error", "time.compute_virtual", "time.cpu", "time.critical", "time.data", "time.download",
        "time.evaluate", "time.queue", "time.reply", "time.round", "time.round_virtual", "time.start", "time.step",
        "time.upload", "time.wait", "time.worked", "traffic.received", "traffic.sent", "update.staleness",
    },
    1: set(),
    2: {
        "adapter.change", "adapter.drift", "adapter.effective_rank", "adapter.energy_above", "adapter.energy_kept",
        "adapter.product_error", "adapter.product_error_by_rank", "adapter.rank", "adapter.scale",
        "adapter.stable_rank", "adapter.unmoved", "held_back.loss", "model.flops_utilisation", "perplexity.after",
        "perplexity.before", "throughput.tokens", "tokens", "tokens.full", "tokens.length", "tokens.padding",
        "update.adapter_change", "update.adapter_rank", "update.adapter_scale", "update.inputs_alike",
        "update.inputs_apart",
        "initial.accuracy", "initial.held_back.loss", "initial.loss", "local.accuracy", "local.loss", "absolute_error",
        "local.absolute_error", "attack.success",
        "accuracy", "batch.size", "data.constant", "data.duplicates", "data.length", "data.mean", "data.missing",
        "data.out_of_range", "data.within_classes", "data.explained",
        "data.std", "fit.accuracy_after", "fit.accuracy_before", "fit.confident_wrong", "fit.confusion",
        "optimizer.learning_rate", "optimizer.momentum", "optimizer.weight_decay", "train.accuracy", "train.confusion",
        "train.loss_common", "train.loss_first", "train.loss_last", "train.loss_long", "train.loss_rare",
        "train.loss_short", "train.residual_kurtosis", "train.residual_mean",
        "train.residual_std",
        "fit.loss_after", "fit.loss_before", "fit.loss_p90", "fit.samples", "gradient.change",
        "gradient.change_round", "gradient.nonfinite", "gradient.norm", "gradient.norm_last", "gradient.norm_max",
        "gradient.norm_unclipped", "loss",
        "nonlinearity.nlc", "samples", "scale.from_batch", "scale.gsc", "scale.gsc_error", "scale.gsc_median",
        "scale.gsc_spread", "scale.images", "scale.nonfinite_samples", "scale.sensitivity", "scale.sensitivity_error",
        "scale.sensitivity_median", "scale.sensitivity_spread", "scale.zero_samples", "throughput.samples",
        "update.base_age", "update.cosine_mean", "update.factor",
        "update.cosine_previous", "update.differs", "update.duplicates", "update.nonfinite", "update.norm",
        "update.samples", "update.zero",
        "weight.difference", "weight.difference_absolute", "weight.drift", "weight.drift_init", "weight.nonfinite",
        "weight.norm", "weight.update_ratio",
    },
    3: {
        "data.max", "data.min", "fit.confused_guess", "fit.confused_label", "label.entropy", "train.confused_guess",
        "train.confused_label",
    },
    4: set(),
}  # fmt: skip


def test_the_levels_are_those_that_we_publish():
    """A new metric is put here by hand, after a thought. Every family of layer statistics needs level 3."""
    assert {level: {m.name for m in CATALOG.values() if m.level == level} for level in LEVEL} == CLAIM
    assert {family.level for family in FAMILIES.values()} == {3}
    assert len(LEVELS) == len(LEVEL)


# -- canaries ---------------------------------------------------------------------------------------------------------

WORDS = (
    "canary-log", "canary-args", "canary-extra", "canary-logged-exception", "canary_frame", "canary-attribute",
    "canary-timed", "canary-failure", "canary-probe", "canary-value", "canary-thread", "canary-passing",
)  # fmt: skip
LABEL, SAMPLES = 31337, 4241
LOSS, LOGGED, THREADED = 3.1415927410125732, 271828.1828459, 161803.3988749
GRADIENT, WEIGHT, ACTIVATION = 54321.125, 7.351913, 777.25
CLIENT, SERVER = "c0", (None, "server")
server, user = logging.getLogger("own.server"), logging.getLogger("own.client")
user.setLevel(logging.INFO)


def constant_loss(output, y, reduction="mean"):
    losses = output.sum(1) * 0 + LOSS
    return losses if reduction == "none" else losses.mean()


def broken_probe(word, _view):
    raise RuntimeError(word)


def canary_frame():
    raise KeyError("canary-logged-exception")


def leaky_client(monitor):
    """Everything that a client could give away."""
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = ACTIVATION
        model[2].weight[0, 0] = WEIGHT
    x, y = torch.randn(SAMPLES, 12), torch.full((SAMPLES,), LABEL)
    optimizer = torch.optim.SGD(model.parameters(), 1e-12)

    def plant(_step):
        model[0].weight.grad[0, 0] = GRADIENT

    with monitor.client(CLIENT, model, data=(x, y), loss=constant_loss):
        train(model, optimizer, (x, y % 3), 2, plant)
        user.info("canary-log info")
        user.warning("canary-log %s", "canary-args", extra={"exception": "canary-extra", "patient": "canary-extra"})
        try:
            canary_frame()
        except KeyError:
            user.exception("canary-log")
        with contextlib.suppress(ValueError), fv.timed("load", error="canary-attribute", patient="canary-attribute"):
            raise ValueError("canary-timed")
        monitor.log(mine=LOGGED)
        monitor.log(mine="canary-value")  # not a number: our own error quotes it
        thread = threading.Thread(target=lambda: (user.warning("canary-thread"), monitor.log(threaded=THREADED)))
        thread.start()
        thread.join()
        raise RuntimeError("canary-failure")


def leaky_run(store, sink, **settings):
    """One round of a client that leaks wherever it can and of one that does not, and the server's own lines."""
    settings["probes"] = [settings["probes"], functools.partial(broken_probe, "canary-probe")]
    torch.manual_seed(0)
    with fv.Monitor(store, sinks=[sink], **settings) as monitor:
        with contextlib.suppress(ValueError), monitor.round(0, nn.Linear(2, 2)):
            with contextlib.suppress(RuntimeError), fv.timed("serve", shard="server-attribute"):
                leaky_client(monitor)
            model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))
            with monitor.client("c1", model):
                train(model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(16, 12), torch.zeros(16).long()), 2)
            server.warning("server-line")
            monitor.log(own=0.25)
            raise ValueError("canary-passing")  # stands for what came through from a client
        monitor.log(accuracy=0.5)
    return monitor


def text_of(records):
    return "\n".join(repr(r) if not isinstance(r, LayerStats) else f"{r.where} {r.family}" for r in records)


def bytes_of(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def numbers_of(records):
    """All numbers that were told of clients, as float32; but for those that the server computes from updates."""
    found = set()
    for record in records:
        match record:
            case Metric(name=name, value=value) if not name.startswith("update."):
                found.add(np.float32(value))
            case LayerStats(family=family, where=where) if where.node != "server" and not family.startswith("update"):
                found.update(np.float32(record.matrix).ravel().tolist())
    return {float(number) for number in found}


def our_log(caplog):
    return "\n".join(caplog.handler.format(r) for r in caplog.records if r.name.partition(".")[0] == "fedvitals")


def check_words(text, level, tracebacks=True):
    """Below level 3 none of a client's words; from it on all of them, but the traceback only if wished."""
    for word in WORDS:
        wanted = level >= 3 and (tracebacks or word != "canary_frame")
        assert (word in text) == wanted, word
    # As a number of its own: the same digits may stand by chance inside a time or a norm.
    assert not re.search(rf"(?<![\d.]){LABEL}(?!\d)", text) or level >= 3


@pytest.mark.parametrize("privacy", LEVEL)
@pytest.mark.parametrize("probes", PRESETS)
def test_canaries(probes, privacy, tmp_path, caplog):
    """Every preset, every level: sink, store file and log hold what the level allows, and nothing else."""
    sink = MemorySink()
    monitor = leaky_run(tmp_path / "runs.db", sink, probes=probes, privacy=privacy)
    assert monitor.lost == 0
    raw, records, log = bytes_of(tmp_path), sink.records, our_log(caplog)
    check_words(text_of(records), privacy)
    check_words(raw.decode("latin-1"), privacy)
    assert ("canary-probe" in log) == ("canary-value" in log) == (privacy >= 3)
    assert not [word for word in WORDS if word in log and word not in ("canary-probe", "canary-value")]
    assert log.count("fedvitals could not finish") == 2
    numbers = numbers_of(records)
    detailed = privacy >= 3 and probes != "light"
    told = {
        LOSS: privacy >= 2, LOGGED: privacy >= 2, THREADED: privacy >= 2, SAMPLES: privacy >= 2,
        GRADIENT: detailed, WEIGHT: detailed, ACTIVATION: detailed,
    }  # fmt: skip
    assert {number: float(np.float32(number)) in numbers for number in told} == told
    for number in (LOSS, LOGGED, THREADED):
        assert (struct.pack(">d", number) in raw) == (privacy >= 2)  # SQLite's REAL
    for number in (GRADIENT, WEIGHT, ACTIVATION):
        assert (struct.pack("<f", number) in raw) == detailed  # a matrix in the store
    check_kinds(sink, privacy, detailed, deep=probes == "deep", timed=probes != "light")
    check_what_always_passes(sink)


def check_kinds(sink, privacy, detailed, deep, timed):
    """Record by record: what is about a client needs no higher level than was chosen, and that level is used."""
    about = [r for r in sink.records if not isinstance(r, Run) and r.where.node not in SERVER]
    metrics = {r.name: CATALOG[r.name].level if r.name in CATALOG else 2 for r in about if isinstance(r, Metric)}
    own = {name: level for name, level in metrics.items() if not name.startswith("update.")}
    assert max(own.values()) == {1: 0}.get(privacy, min(privacy, 3))
    assert {"steps", "time.client", "update.norm"} <= metrics.keys()
    assert ({"loss", "samples", "user.mine"} <= metrics.keys()) == (privacy >= 2)
    families = {r.family for r in sink.of(LayerStats) if r.where.node != "server" and not r.family.startswith("update")}
    wanted = {"gradient", "gradient.steps", "training.classes", "weight"}
    if deep:
        wanted |= {"gradient.histogram", "gradient.full", "activation", "activation.health"}
    assert families == (wanted if detailed else set())
    assert bool(sink.events("labels")) == detailed
    spans = {span.name: span for span in sink.of(Span)}
    assert ("patient" in spans["load"].attributes) == (privacy >= 3)
    assert spans["load"].attributes["error"] == "ValueError"
    told = spans["client"].attributes
    assert set(told) <= {"failed", "parts", "folded"} | ({"samples", "batch"} if privacy >= 3 else set())
    assert {type(seconds) for seconds in told.get("parts", {}).values()} == ({float} if timed else set())
    lines = sink.events("log", node=CLIENT)
    assert {line.level for line in lines} == {"warning", "error"} | ({"info"} if privacy >= 3 else set())
    if privacy < 3:
        assert [line.data for line in lines] == [
            {"logger": "own.client"}, {"logger": "own.client", "exception": "KeyError"},
        ]  # fmt: skip


def check_what_always_passes(sink):
    """Liveness and error class of clients; whatever the server says of itself."""
    failed = {e.name: e.data["exception"] for e in sink.events() if e.name.endswith(".failed")}
    assert failed == {"client.failed": "RuntimeError", "round.failed": "ValueError"}
    assert {e.data["exception"] for e in sink.events("monitor.error")} == {"RuntimeError", "ConfigError"}
    assert holds_for_each(
        "the probe 'partial'" in e.data["doing"] or "log()" in e.data["doing"] for e in sink.events("monitor.error")
    )
    assert [e.message for e in sink.events("log") if e.data["logger"] == "own.server"] == ["server-line"]
    assert sink.value("accuracy") == 0.5
    assert sink.value("user.own") == 0.25
    assert sink.value("clients.failed") == 1
    (span,) = sink.of(Span, "serve")
    assert span.attributes["shard"] == "server-attribute"
    assert sink.of(LayerStats, "weight", node="server")


@pytest.fixture(scope="module")
def everything():
    """All that the leaky client could give, as at level 4."""
    sink = MemorySink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("fedvitals"), "disabled", True)
        leaky_run(None, sink, probes="deep", privacy=4)
    check_words(text_of(sink.records), 4)
    return sink.records


def test_findings_and_actions_quote_nobody(everything):
    """They pass at every level: even where words are allowed, none of a client's is in them."""
    found = [r for r in everything if isinstance(r, Finding)]
    done = [r for r in everything if isinstance(r, Action)]
    assert {f.issue for f in found} >= {"CRASH"}
    assert {f.evidence.get("exception") for f in found if f.issue == "CRASH"} == {"RuntimeError", "ValueError"}
    assert done
    assert "canary" not in text_of([*found, *done])


@pytest.mark.parametrize("tracebacks", [False, True])
@pytest.mark.parametrize("privacy", LEVEL)
def test_the_spill_folder_holds_no_more(everything, privacy, tracebacks, tmp_path):
    """What a broken sink could not take lies in a file, behind the same gate."""
    policy = PrivacyPolicy(privacy, tracebacks=tracebacks)
    sink_writer = SinkWriter([Keeping(OSError("down"))], policy=policy, spill=tmp_path, strict=False)
    for record in everything:
        sink_writer.emit(record, stray=True)
    sink_writer.close(0.05)
    text = bytes_of(tmp_path).decode()
    if privacy < 3:
        check_words(text, privacy)
    for word in ("canary-failure", "canary-log", "canary-timed", "canary-thread"):
        assert (word in text) == (privacy >= 3)
    assert ("canary_frame" in text) == ("Traceback (most recent" in text) == (privacy >= 3 and tracebacks)
    assert "client.failed" in text
    assert "KeyError" in text


@pytest.mark.parametrize("privacy", LEVEL)
def test_the_wire_holds_no_more(everything, privacy):
    """What a worker process sends home is let through before it becomes bytes."""
    wire = pytest.importorskip("fedvitals.transport.wire.payload")
    policy = PrivacyPolicy(privacy)
    passed = [r for record in everything if (r := released(record, policy, stray=True)) is not None]
    payload = wire.encode(passed)
    back = wire.decode(payload)
    check_words(text_of(back), privacy)  # the bytes themselves may be compressed
    for number in (GRADIENT, WEIGHT, ACTIVATION):
        assert (struct.pack("<f", number) in payload) == (privacy >= 3)
    assert len(back) == len(passed)
    names = {r.name for r in back if isinstance(r, Metric)}
    assert "time.client" in names
    assert ("user.mine" in names) == ("update.norm" in names) == (privacy >= 2)  # a client's word on its own update
    assert any(isinstance(r, Sketch) for r in back) == (privacy >= 3)
    assert any(isinstance(r, LayerStats) for r in back) == (privacy >= 3)


# -- in doubt, a client's ---------------------------------------------------------------------------------------------


def test_the_servers_own_words_while_clients_train_elsewhere():
    """The main thread, inside its round, speaks for the server though clients train on other threads."""
    monitor, sink = watched(privacy=0)
    began, done = threading.Event(), threading.Event()

    def work():
        with monitor.client("c0"):
            began.set()
            done.wait(PATIENCE)
            user.warning("canary-log")

    with monitor, monitor.round(0):
        thread = threading.Thread(target=work)
        thread.start()
        began.wait(PATIENCE)
        server.warning("server-line")
        monitor.log(own=1)
        done.set()
        thread.join()
    assert [e.message for e in sink.events("log", node=None)] == ["server-line"]
    assert sink.value("user.own") == 1
    assert "canary" not in str(sink.records)


def test_clients_closed_in_another_order():
    """The scope is the round's again while c1 still trains: what is said then may be c1's."""
    monitor, sink = watched(privacy=0)
    with monitor.round(0):
        monitor.host.client_begin("c0")
        monitor.host.client_begin("c1")
        monitor.host.client_end("c0")
        user.warning("canary-log")
        monitor.log(loss=LOSS)
        monitor.host.client_end("c1")
    monitor.log(accuracy=0.5)
    monitor.close()
    assert "canary" not in str(sink.records)
    assert sink.names() & {"loss", "accuracy"} == {"accuracy"}


def test_names_open_no_door():
    """A client called as its group, or as the server, is a client."""
    monitor, sink = watched(privacy=0)
    with monitor, monitor.round(0):
        for name, group in (("edge-1", "edge-1"), ("server", None)):
            with monitor.client(name, group=group):
                user.warning("canary-log")
                monitor.log(loss=LOSS)
    assert "canary" not in str(sink.records)
    assert not sink.metrics("loss")


def test_an_error_of_ours_while_a_client_closes(caplog, monkeypatch):
    """It is reported as the client's, though the scope has been left by then; also from a thread that closes."""
    sink = MemorySink()
    monitor = fv.Monitor(None, sinks=[sink], privacy=2)
    model = nn.Linear(4, 3)

    def fail(session):
        session.abandon()
        raise RuntimeError("canary-value")

    monkeypatch.setattr(ClientSession, "stop", fail)
    for close in (lambda: monitor.host.client_end("c0"), monitor.close):
        monitor.host.round_begin(0)
        monitor.host.client_begin("c0", model)
        closing = threading.Thread(target=close)
        closing.start()
        closing.join()
        monitor.host.round_end(0)
        current.set(None)  # another thread could not
    (event,) = sink.events("monitor.error")
    assert (event.where.node, event.data) == ("c0", {"doing": "closing a client", "exception": "RuntimeError"})
    assert "canary" not in str(sink.records) + caplog.text
    assert "closing a client: RuntimeError" in caplog.text


def test_a_span_that_is_not_taken_quotes_no_client(caplog):
    """`timed` says so without the exception that ended the block, which a traceback of ours would show, too."""

    def refuse(_record):
        raise OSError("no room")

    token = current.set(Scope("run", refuse, 0, "c0"))
    with contextlib.suppress(ValueError), fv.timed("load"):
        raise ValueError("canary-timed")
    current.reset(token)
    assert "could not be handed over" in caplog.text
    assert "canary" not in caplog.text


# -- the function itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("privacy", LEVEL)
def test_each_kind_of_record(privacy, held):
    """By level; what is from an update passes where the updates are held, and only there."""
    policy = PrivacyPolicy(privacy)
    passed = {type(r) for r in examples_of_records() if released(r, policy, held=held) is not None}
    wanted = {"Run", "Span", "Transfer", "Event", "Finding", "Action", "Truth"} | ({"Metric"})
    wanted |= {"LayerStats", "Sketch"} if privacy >= 3 else set()
    wanted |= {"Sketch"} if held else set()
    wanted |= {"Snapshot"} if privacy >= 4 else set()
    assert {kind.__name__ for kind in passed} == wanted
    update = LayerStats(Where("r", 0, "c7"), 0.0, "update", np.ones((2, 9)), "")
    assert (released(update, policy, held=held) is not None) == (held or privacy >= 3)
    tape = Snapshot(Where("r", 0, "c7"), 0.0, "update", "ab", 1)
    assert (released(tape, policy, held=held) is not None) == (held or privacy >= 4)


@pytest.mark.parametrize("privacy", LEVEL)
def test_what_has_passed_passes_again_unchanged(everything, privacy):
    """A worker asks before it sends, and the process that writes the store asks again."""
    policy = PrivacyPolicy(privacy)
    once = [r for record in everything if (r := released(record, policy)) is not None]
    assert [released(record, policy) for record in once] == once


def test_nothing_is_changed_in_place(everything):
    """What is cut is a copy: the record belongs to whoever made it."""
    before = [to_json(record) for record in everything if isinstance(record, Event)]
    for record in everything:
        released(record, PrivacyPolicy(0), stray=True)
    assert [to_json(record) for record in everything if isinstance(record, Event)] == before


def test_an_event_that_nobody_thought_of_loses_its_words():
    """Closed by default: an event of a new name keeps its name, level and place."""
    event = Event(Where("r", 0, "c7"), 0.0, "error", "brand.new", "canary-log", {"exception": "canary-extra"})
    kept = released(event, PrivacyPolicy(2))
    assert (kept.name, kept.level, kept.where, kept.data) == ("brand.new", "error", event.where, {})
    assert "canary" not in str(kept)
    assert "brand.new" not in LEFT
