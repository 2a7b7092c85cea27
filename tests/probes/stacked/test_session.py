# SPDX-License-Identifier: Apache-2.0
"""Clients that train as one batch: the same records as if each had trained alone, and the same weights as unwatched."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from fedvitals.kernels import sums
from fedvitals.probes.full_gradient import full_gradient
from fedvitals.probes.gradients import gradient_histogram, gradients, last_gradient
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.presets import Planned, Preset, preset
from fedvitals.probes.scale import scale
from fedvitals.probes.weights import weights
from fedvitals.protocols import WorkerObserver
from fedvitals.records import Event, LayerStats, Metric, Span
from fedvitals.schedule import always, every
from fedvitals.stack import Stack
from fedvitals_studies.bench.workloads import paper_cnn
from support.conditions import holds_for_each
from support.models import cnn, mlp, watched

# Batched matrix products and grouped convolutions add in another order than single ones, and training carries it on.
TOLERANCE = 2e-4
# Rounding also decides which of two nearly equal pixels a max pool takes, and the gradient then goes another way. With
# one and the same weights, three of four images agree to 1e-7 between 32 and 64 bits, and one is off by 6e-5.
POOLED = 1e-3
TIMED = ("time.", "memory.", "monitor.", "throughput.", "bottleneck.", "machine.", "process.", "gpu.")
# A batch of clients does not tell how many samples each of its batches has, nor whose memory is whose.
SHARES = (
    "growth", "model", "buffers", "gradients", "optimizer", "activations", "batch", "telemetry", "tensors", "limit",
    "cuda_allocated", "cuda_reserved",
)  # fmt: skip
ALONE = ("throughput.samples", "time.critical", *(f"memory.{name}" for name in SHARES))
RATE = 0.05
NODES = ["c0", "c1", "c2"]
GROUPS = ["edge-0", "edge-0", None]

# Nothing in it depends on how long things take, so that two runs give the same.
FULL = Preset(
    "full",
    (
        Planned(gradients, always, each=True),
        Planned(weights),
        Planned(scale(images=6)),
        Planned(scale(images=4), every(2)),
        Planned(nonlinearity(images=8)),
        Planned(full_gradient),
    ),
    fit_percent=None,
    difference_each_step=True,
    training_losses=1,
)


class Federation:
    """Three clients with data of their own, trained from the same module by plain SGD, one by one or as a stack."""

    def __init__(self, module, inputs, classes, *, steps=4, samples=40, batch=8, device="cpu", own=None):
        stream = torch.Generator().manual_seed(5)
        self.module, self.steps, self.batch, self.device = module.to(device), steps, batch, device
        self.own = own or [steps] * len(NODES)  # steps of each client
        self.x = torch.randn(len(NODES), samples, *inputs, generator=stream).to(device)
        self.y = torch.randint(0, classes, (len(NODES), samples), generator=stream).to(device)
        self.tensors = [*module.named_parameters(), *module.named_buffers()]
        self.weights = sum(p.numel() for p in module.parameters())

    def states(self):
        state = torch.cat([t.detach().reshape(-1).float() for _, t in self.tensors])
        return state.expand(len(NODES), -1).clone()

    def part(self, step):
        first = step * self.batch % self.x.shape[1]
        return slice(first, first + self.batch)

    def alone(self, observer):
        """Each client's state afterwards, [clients, size]."""
        rows = []
        for i, (node, group) in enumerate(zip(NODES, GROUPS, strict=True)):
            model = copy.deepcopy(self.module)
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            data = (self.x[i], self.y[i])
            if observer is not None:
                observer.client_begin(node, model, optimizer, data, group, loss=functional.cross_entropy)
            for step in range(self.own[i]):
                optimizer.zero_grad()
                functional.cross_entropy(model(data[0][self.part(step)]), data[1][self.part(step)]).backward()
                optimizer.step()
            if observer is not None:
                observer.client_end(node)
            rows.append(torch.cat([t.detach().reshape(-1).float() for t in (*model.parameters(), *model.buffers())]))
        return torch.stack(rows)

    def samples(self, count):
        """As `samples.spread` would choose them in round 0."""
        count = min(count, self.x.shape[1])
        stride = self.x.shape[1] / count
        places = [int(k * stride) for k in range(count)]
        return self.x[:, places], self.y[:, places]

    def stack(self, states, **settings):
        labels = [*self.y]
        own = {
            "optimizer.learning_rate": RATE,
            "optimizer.momentum": 0,
            "optimizer.weight_decay": 0,
            "batch.size": self.batch,
        }
        given = {"loss": functional.cross_entropy, "labels": labels, "inputs": [*self.x], "settings": own, **settings}
        if len({*self.own}) > 1:
            given["steps"] = self.own
        return Stack(NODES, GROUPS, self.module, states, self.samples, **given)

    def stacked(self, observer, failed=None, spoil=lambda step, gradients: None, **settings):
        """The same by `torch.func`; the module is used for its forward pass only."""
        states = self.states()

        def loss(trained, rest, x, y):
            logits = functional_call(self.module, {**trained, **rest}, (x,))
            return functional.cross_entropy(logits, y), logits

        outputs = {}
        if observer is not None:
            observer.stack_begin(self.stack(states, **{"outputs": lambda: outputs, **settings}))
        sizes = [t.numel() for _, t in self.tensors]
        for step in range(self.steps):
            views = states.split(sizes, 1)
            state = {n: v.view(-1, *t.shape).to(t.dtype) for (n, t), v in zip(self.tensors, views, strict=True)}
            trained = {n: state.pop(n) for n, p in self.module.named_parameters() if p.requires_grad}
            parts = [self.part(min(step, own - 1)) for own in self.own]  # who is done gets the last one again
            batch = [torch.stack([all_[i, part] for i, part in enumerate(parts)]) for all_ in (self.x, self.y)]
            found, (losses, logits) = vmap(grad_and_value(loss, has_aux=True))(trained, state, *batch)
            outputs[step] = (logits, batch[1])
            names = [name for name, _ in self.module.named_parameters()]
            parts = [found[n] if n in found else torch.zeros_like(state[n]) for n in names]
            matrix = torch.cat([part.flatten(1) for part in parts], 1)
            spoil(step, matrix)
            if observer is not None:
                observer.stack_step(step, matrix, losses)
            with torch.no_grad():
                active = torch.tensor(self.own)[:, None].to(self.device) > step
                states[:, : self.weights] -= RATE * torch.where(active, matrix, 0.0)
        if observer is not None:
            observer.stack_end(failed or {})
        return states


def small():
    torch.manual_seed(0)
    return Federation(mlp(), (12,), 3)


def convolutional():
    torch.manual_seed(0)
    return Federation(paper_cnn(), (3, 32, 32), 43, steps=3, samples=16, batch=4)


def normalised():
    """With buffers: a batch norm that is not trained, since its running statistics would be of one client only."""
    torch.manual_seed(0)
    module = cnn()
    module[2].eval()
    return Federation(module, (12,), 3)


def partly_frozen():
    torch.manual_seed(0)
    module = mlp()
    module[0].weight.requires_grad_(False)
    return Federation(module, (12,), 3)


def observed(probes, train, rounds=1, through_worker=True, **settings):
    """The records of a federation that `train(observer)` trains, and the states of its last round."""
    monitor, sink = watched(probes, **settings)
    with monitor:
        for number in range(rounds):
            with monitor.round(number):
                if through_worker:
                    worker = monitor.host.for_worker()
                    states = train(worker)
                    monitor.host.absorb(worker.payload())
                else:
                    states = train(monitor.host)
    return sink, states


def key(record):
    w = record.where
    return w.round, w.node, w.step, w.group, getattr(record, "name", getattr(record, "family", None))


def _name(record):
    return getattr(record, "name", "")


def check_alike(sink, twin, tolerance=TOLERANCE, estimated=()):
    """Every metric, matrix, span and event of the twin, once, with its value; and nothing else.

    `estimated`: beginnings of names whose values are random estimates, and may differ.
    """
    for kind in (Metric, LayerStats, Span, Event):
        apart = ("stack.unmeasured", *ALONE)
        told, alone = (
            (r for r in s.of(kind) if r.where.node != "server" and _name(r) not in apart) for s in (sink, twin)
        )
        assert Counter(key(r) for r in told) == Counter(key(r) for r in alone), kind
    wanted = {key(r): r.value for r in twin.metrics()}
    for r in sink.metrics():
        if not r.name.startswith((*TIMED, *estimated)):
            np.testing.assert_allclose(
                r.value, wanted[key(r)], rtol=tolerance, atol=tolerance / 10, err_msg=str(key(r))
            )
    wanted = {key(r): r for r in twin.of(LayerStats)}
    for r in sink.of(LayerStats):
        largest = np.abs(wanted[key(r)].matrix[np.isfinite(wanted[key(r)].matrix)]).max(initial=0)
        error = f"{key(r)}"
        np.testing.assert_allclose(
            r.matrix, wanted[key(r)].matrix, rtol=tolerance, atol=tolerance / 10 * max(1, largest), err_msg=error
        )
        assert sink.table(r.table).names == twin.table(wanted[key(r)].table).names
    labels, wanted = ({key(r): r.data for r in s.of(Event) if r.name == "labels"} for s in (sink, twin))
    assert labels == wanted


def unequal():
    """One epoch each, of unequal data: who is done rests, while the others go on."""
    torch.manual_seed(0)
    return Federation(mlp(), (12,), 3, steps=5, own=[2, 5, 3])


@pytest.mark.parametrize("make", [small, convolutional, normalised, partly_frozen, unequal])
def test_stacked_clients_record_what_each_would_alone(make):
    federation = make()
    twin, alone = observed(FULL, federation.alone)
    sink, states = observed(FULL, federation.stacked)
    np.testing.assert_allclose(states, alone, rtol=1e-3, atol=1e-5)  # else the twins are no twins
    check_alike(sink, twin, POOLED if make is convolutional else TOLERANCE)
    told = {r.name for r in sink.metrics() if r.where.node == "c0"}
    assert {"fit.loss_before", "fit.confusion", "loss", "samples", "label.entropy", "scale.gsc", "scale.gsc_error",
            "nonlinearity.nlc", "gradient.change", "weight.update_ratio", "steps", "time.client"} <= told  # fmt: skip
    families = {r.family for r in sink.of(LayerStats) if r.where.node == "c0"}
    assert {"gradient", "gradient.steps", "weight", "update", "training.classes"} <= families
    assert {"train.loss_first", "train.accuracy", "train.confusion", "optimizer.learning_rate", "batch.size"} <= told
    assert ("buffer" in families) == (make is normalised)


def test_exact_gradient_scale():
    """On more samples than one portion holds, and with one backward pass per output."""
    torch.manual_seed(0)
    federation = Federation(mlp(), (12,), 3, samples=80)
    for probe in (scale(images=70, exact=True), scale(images=70)):
        planned = Preset("scale", (Planned(probe),), fit_percent=None)
        twin, _ = observed(planned, federation.alone)
        sink, _ = observed(planned, federation.stacked)
        check_alike(sink, twin)
        assert sink.value("scale.images", node="c0") == 70


def test_second_round_knows_the_first():
    """`gradient.change_round`, labels that are told once, and a probe of every second round."""
    federation = small()
    twin, _ = observed(FULL, federation.alone, rounds=2)
    sink, _ = observed(FULL, federation.stacked, rounds=2)
    # The samples of round 1 are chosen by the host of a stack, here those of round 0: what depends on them may differ.
    chosen = ("fit.", "scale.", "nonlinearity.", "loss")
    for s in (sink, twin):
        s.records[:] = [r for r in s.records if not (getattr(r, "name", "").startswith(chosen) and r.where.round)]
    check_alike(sink, twin)
    assert sink.metrics("gradient.change_round")
    assert len(sink.events("labels")) == len(NODES)


@pytest.mark.parametrize("probes", ["light", "deep"])
def test_whoever_rests_is_not_measured(probes):
    """Neither the steps of others nor what a client would have done in them count as its own."""
    federation = unequal()
    planned = [p for p in preset(probes).probes if p.probe in (gradients, gradient_histogram, last_gradient)]
    planned = Preset(probes, tuple(planned), fit_percent=None, brief=probes == "light")
    twin, _ = observed(planned, federation.alone)
    sink, _ = observed(planned, federation.stacked)
    check_alike(sink, twin)
    assert [sink.value("steps", node=node) for node in NODES] == [2, 5, 3]


@pytest.mark.parametrize("probes", ["light", "standard"])
def test_presets_measure_the_same_names(probes):
    """The first round, in which the first client is due."""
    federation = small()
    twin, _ = observed(probes, federation.alone)
    sink, _ = observed(probes, federation.stacked)
    names = {r.name for r in twin.metrics()} - {*ALONE}
    assert {r.name for r in sink.metrics()} - {*ALONE} == names
    assert {r.family for r in sink.of(LayerStats)} == {r.family for r in twin.of(LayerStats)}
    assert not sink.events("stack.unmeasured")
    for name in ("gradient.norm_last", "gradient.nonfinite", "steps", "samples"):
        found, wanted = ({r.where.node: r.value for r in s.metrics(name)} for s in (sink, twin))
        np.testing.assert_allclose([found[n] for n in NODES], [wanted[n] for n in NODES], rtol=TOLERANCE)


def test_deep_says_once_what_it_leaves_out():
    sink, _ = observed("deep", small().stacked, rounds=2)
    (event,) = sink.events("stack.unmeasured")
    assert event.data["probes"] == ["activations"]
    assert event.where.node is None
    assert {r.family for r in sink.of(LayerStats)} >= {"gradient.histogram", "gradient", "weight"}
    steps = [r.where.step for r in sink.of(LayerStats) if r.family == "gradient" and r.where.node == "c1"]
    assert Counter(steps) == Counter({None: 2, 0: 2, 1: 2, 2: 2, 3: 2})


def test_probe_of_ones_own_is_named_as_left_out():
    def mine(view):
        return {"mine": 1.0}

    sink, _ = observed([FULL, mine], small().stacked, through_worker=False)
    (event,) = sink.events("stack.unmeasured")
    assert event.data["probes"] == ["mine"]


def test_schedule_of_steps_is_kept():
    sparse = Preset("sparse", (Planned(gradients, every(2)),), fit_percent=None)
    federation = small()
    twin, _ = observed(sparse, federation.alone)
    sink, _ = observed(sparse, federation.stacked)
    check_alike(sink, twin)


@pytest.mark.thorough
@pytest.mark.parametrize("when", [always, every(2)], ids=["always", "every"])
@pytest.mark.parametrize("make", [small, unequal, partly_frozen])
def test_a_host_that_records_sums_itself_is_believed(make, when):
    """`Stack.sums`: the same records, and nothing is measured at a step."""
    federation, rows = make(), []
    planned = Preset("own", (Planned(gradients, when), Planned(last_gradient)), fit_percent=None)
    sizes, trained = zip(*((p.numel(), p.requires_grad) for p in federation.module.parameters()), strict=True)

    def record(step, matrix):
        parts = zip(matrix.split(sizes, 1), trained, strict=True)
        rows.append(torch.as_tensor(sums([part if there else None for part, there in parts], clients=True)))
        assert len(rows) == step + 1

    twin, _ = observed(planned, federation.stacked)
    sink, _ = observed(planned, lambda o: federation.stacked(o, spoil=record, sums=lambda: torch.stack(rows)))
    check_alike(sink, twin, 1e-12)
    assert sink.metrics("gradient.norm_last")


def test_monitor_itself_watches_a_stack():
    """In its own process: updates are compared, which a worker leaves to the server."""
    sink, _ = observed("standard", small().stacked, through_worker=False)
    twin, _ = observed("standard", small().alone, through_worker=False)
    for name in ("update.norm", "update.cosine_mean"):
        found, wanted = ({r.where.node: r.value for r in s.metrics(name)} for s in (sink, twin))
        np.testing.assert_allclose([found[n] for n in NODES], [wanted[n] for n in NODES], rtol=TOLERANCE, atol=1e-5)


@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_training_is_bit_for_bit_the_same(probes):
    federation = small()
    before = [t.clone() for _, t in federation.tensors]
    modes = [m.training for m in federation.module.modules()]
    torch.manual_seed(7)
    plain = federation.stacked(None)
    random = torch.rand(1)
    torch.manual_seed(7)
    _, states = observed(probes, federation.stacked)
    assert torch.equal(states, plain)
    assert torch.equal(torch.rand(1), random)
    assert holds_for_each(torch.equal(a, b) for a, (_, b) in zip(before, federation.tensors, strict=True))
    assert modes == [m.training for m in federation.module.modules()]
    assert holds_for_each(p.grad is None for p in federation.module.parameters())
    assert not federation.module[0]._forward_hooks


def test_failed_clients_and_gradients_that_are_not_finite():
    def spoil(step, gradients):
        if step == 2:
            gradients[1, :7] = torch.nan

    federation = small()
    sink, _ = observed(
        FULL, lambda w: federation.stacked(w, {"c2": OSError("disk full")}, spoil), strict=False, cohort=2
    )
    nonfinite = {r.where.node: r.value for r in sink.metrics("gradient.nonfinite")}
    assert nonfinite["c0"] == 0
    assert nonfinite["c1"] >= 7
    weight = {r.where.node: r.value for r in sink.metrics("weight.nonfinite")}
    assert weight["c0"] == 0 < weight["c1"]
    # A sick client's samples are told as not finite, and do not poison the others.
    sick = {r.where.node: r.value for r in sink.metrics("scale.nonfinite_samples") if r.where.round == 0}
    assert sick["c0"] == 0
    assert sick["c1"] > 0
    assert {r.where.node for r in sink.metrics("scale.gsc") if r.where.step is None} == {"c0", "c2"}
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.data["exception"]) == ("c2", "OSError")
    assert {s.where.node: s.attributes["failed"] for s in sink.of(Span) if s.name == "client"} == {
        "c0": False, "c1": False, "c2": True,
    }  # fmt: skip
    assert [r.value for r in sink.metrics("clients.failed")] == [1]
    assert not sink.events("monitor.error")


def test_without_samples_or_loss_the_rest_is_measured():
    def refuse(count):
        raise OSError("no samples")

    federation = small()
    monitor, sink = watched("standard", strict=False)
    with monitor, monitor.round(0):
        worker = monitor.host.for_worker()
        states = federation.states()
        worker.stack_begin(Stack(NODES, GROUPS, federation.module, states, refuse, functional.cross_entropy))
        worker.stack_step(0, torch.ones(3, federation.weights), torch.ones(3))
        worker.stack_end({})
        monitor.host.absorb(worker.payload())
    assert len(sink.metrics("gradient.norm")) == 3
    assert not sink.metrics("fit.loss_before")
    assert {e.data["doing"] for e in sink.events("monitor.error")} == {"fit", "the probe 'scale'"}


def test_stack_left_open_does_not_stop_the_next():
    federation = small()
    monitor, sink = watched("standard")
    with monitor, monitor.round(0):
        worker = monitor.host.for_worker()
        worker.stack_begin(federation.stack(federation.states()))
        federation.stacked(worker)
        monitor.host.absorb(worker.payload())
    assert len(sink.events("stack.unclosed")) == 1
    assert Counter(r.value for r in sink.metrics("steps")) == Counter({0: 3, 4: 3})


def test_what_is_logged_of_a_stacked_client_stands_for_its_loss():
    federation = small()
    monitor, sink = watched(replace(preset("standard"), fit_percent=None))
    with monitor, monitor.round(0):
        worker = monitor.host.for_worker()
        assert isinstance(worker, WorkerObserver)
        worker.stack_begin(federation.stack(federation.states()))
        worker.log({"loss": 0.5}, node="c1")
        worker.stack_end({})
        monitor.host.absorb(worker.payload())
    losses = {(r.where.node, r.where.group): r.value for r in sink.metrics("loss")}
    assert set(losses) == {("c0", "edge-0"), ("c1", "edge-0"), ("c2", None)}
    assert losses["c1", "edge-0"] == 0.5


def test_privacy_level_holds_for_stacks():
    sink, _ = observed("standard", small().stacked, privacy=0, cohort=2)
    assert {r.name for r in sink.metrics() if r.where.node not in (None, "server")} <= {
        "steps", "time.client", "time.step", "time.critical", "memory.resident", "monitor.cost",
    }  # fmt: skip
    assert not sink.of(LayerStats)


def test_gradient_histogram_of_a_stack_adds_up():
    planned = Preset("h", (Planned(gradient_histogram, always),), fit_percent=None)
    federation = small()
    sink, _ = observed(planned, federation.stacked)
    twin, _ = observed(planned, federation.alone)
    for node in NODES:
        found, wanted = (
            next(r.matrix for r in s.of(LayerStats) if r.where.node == node and r.family == "gradient.histogram")
            for s in (sink, twin)
        )
        assert found.sum() == wanted.sum()
        assert np.abs(found - wanted).sum() <= 4  # a value beside a power of two may be rounded to its other side


@pytest.mark.gpu
@pytest.mark.parametrize("make", [small, convolutional])
def test_stack_on_a_gpu_records_what_the_processor_does(make):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    here = make()
    there = make()
    there.__init__(there.module, tuple(here.x.shape[2:]), 43 if make is convolutional else 3, steps=here.steps,
                   samples=here.x.shape[1], batch=here.batch, device="cuda")  # fmt: skip
    twin, _ = observed(FULL, here.stacked)
    sink, states = observed(FULL, there.stacked)
    assert states.is_cuda
    check_alike(sink, twin, 1e-2, estimated=("scale.",))  # a GPU draws other signs: see `stacked.scale`
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    _, states = observed("standard", there.stacked)
    assert torch.equal(states, there.stacked(None))
    deep, _ = observed(preset("deep"), there.stacked)
    assert deep.of(LayerStats)
