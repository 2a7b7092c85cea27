# SPDX-License-Identifier: Apache-2.0
"""Run by tests/kernels/cuda/test_stacked.py in a process with TRITON_INTERPRET=1."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedvitals import lab
from fedvitals.kernels.cuda import loading, stacked_conv, stacked_optimizer
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task
from fedvitals.lab.models.blocks import Residual
from fedvitals.lab.stacked import cuda_round
from fedvitals.lab.stacked.conv_blocks import ConvBlocks
from fedvitals.lab.stacked.plans import GroupedPlan, MappedPlan
from fedvitals.lab.topologies.exchanges import average, pass_to_next
from fedvitals.protocols import NullObserver


def convolution():
    torch.manual_seed(0)
    shapes = (
        (8, 3, 5, 3, 0, stacked_conv.LEAKY, 0.3),
        (9, 4, 8, 3, 1, stacked_conv.TANH, 0.0),
        (11, 2, 4, 5, 0, stacked_conv.LEAKY, 0.0),
    )
    for (side, inside, outside, kernel, padding, kind, slope), pool in itertools.product(shapes, (2, 1)):
        x, w, b = (
            torch.randn(2, 3, inside, side, side),
            torch.randn(2, outside, inside, kernel, kernel),
            torch.randn(2, outside),
        )
        x[0, 0, 0, 2, 2] = torch.nan if kind == stacked_conv.TANH else 1.0  # NaN goes through a maximum
        ours = [
            x.permute(0, 1, 3, 4, 2).contiguous().requires_grad_(),
            w.clone().requires_grad_(),
            b.clone().requires_grad_(),
        ]
        theirs = [t.clone().requires_grad_() for t in (x, w, b)]
        # The last one is too large for the kernels' counting, as it were, and is cut.
        stacked_conv._LARGEST = 4 * 9 * 50 * 2 if kernel == 5 else 1 << 30
        block = stacked_conv.ConvBlock(kernel, padding, kind, slope, pool)
        y = stacked_conv.conv_block(*ours, block).permute(0, 1, 4, 2, 3)
        expected = torch.stack([F.conv2d(theirs[0][c], theirs[1][c], theirs[2][c], padding=padding) for c in range(2)])
        expected = F.max_pool2d(expected.flatten(0, 1), 2).unflatten(0, (2, 3)) if pool == 2 else expected
        expected = expected.tanh() if kind == stacked_conv.TANH else F.leaky_relu(expected, slope)
        torch.testing.assert_close(y, expected, atol=2e-6, rtol=1e-5, equal_nan=True)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        y.backward(gradient)
        torch.testing.assert_close(ours[0].grad.permute(0, 1, 4, 2, 3)[1], theirs[0].grad[1], atol=5e-6, rtol=1e-5)
        for got, wanted in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(got.grad[1], wanted.grad[1], atol=5e-6, rtol=1e-5)


def optimizer():
    torch.manual_seed(0)
    clients, weights, steps = 3, 150, 4
    for (kind, count), decay in itertools.product((("sgd", 0), ("momentum", 1), ("adam", 2)), (0.0, 0.1)):
        began = torch.randn(clients, weights + 7)
        states, moments = began.clone(), [torch.zeros(clients, weights) for _ in range(count)]
        twins = [began[c, :weights].clone().requires_grad_() for c in range(clients)]
        theirs = [
            torch.optim.Adam([t], lr=0.01, eps=1e-7, weight_decay=decay)
            if kind == "adam"
            else torch.optim.SGD([t], 0.01, 0.9 * (count > 0), weight_decay=decay)
            for t in twins
        ]
        table = torch.zeros(steps, clients, 3)
        for step in range(steps):
            first, second = (1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)) if kind == "adam" else (1.0, 1.0)
            table[step] = torch.tensor([0.01 / first, second**-0.5, 1.0])
        table[2:, 1, stacked_optimizer.ACTIVE] = 0  # the second client is done after two steps
        counter = torch.zeros(1, dtype=torch.int64)
        for step in range(steps):
            gradients = torch.randn(clients, weights)
            stacked_optimizer.step(kind, states, gradients, moments, table, counter, (0.9, 0.999), 1e-7, decay)
            counter += 1
            for client in range(clients):
                if client != 1 or step < 2:
                    twins[client].grad = gradients[client].clone()
                    theirs[client].step()
        torch.testing.assert_close(states[:, :weights], torch.stack([t.detach() for t in twins]), atol=1e-6, rtol=1e-5)
        assert torch.equal(states[:, weights:], began[:, weights:])


def experiment(model, **more):
    stream = torch.Generator().manual_seed(0)
    x, y = torch.rand(120, 1, 8, 8, generator=stream), torch.randint(3, (120,), generator=stream)
    settings = {"clients": 5, "rounds": 1, "dataset": lab.Arrays(x, y), "seed": 3}
    local = more.pop("local", lab.Local(iterations=3, batch=4, optimizer=lab.Adam(), clip=lab.Clip(0.5)))
    return lab.Experiment(model=model, local=local, **settings, **more)


def residual():
    """ResNet-18's parts, a few of them."""

    def norm(width):
        return nn.GroupNorm(2, width)

    first = (nn.Conv2d(1, 4, 3, 1, 1, bias=False), norm(4), nn.ReLU())
    blocks = (Residual(4, 4, 1, norm), Residual(4, 6, 2, norm))
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def plans():
    """Every plan gives the gradients of every other."""
    small_resnet = lab.Own(residual, stackable=True)
    paper = [lab.paper_cnn(channels=(4, 8)), lab.paper_cnn(scenario="vanishing", channels=(2, 4))]
    for model in (*paper, lab.paper_cnn(channels=(2, 4), pool="none"), small_resnet):
        site = Site.of(experiment(model))
        x, y = (t[:6].unflatten(0, (2, 3)) for t in (site.dataset.inputs(site.dataset.x), site.dataset.y))
        states = site.layout.flat(site.module) * torch.tensor([[0.9], [1.1]])
        found = {}
        candidates = [
            MappedPlan(site.module),
            GroupedPlan.of(site.module, "float32"),
            ConvBlocks.of(site.module, "float32"),
        ]
        for plan in candidates:
            if plan is None:
                assert model is small_resnet
                continue
            gradients = torch.zeros_like(states)
            losses, _ = plan.gradients(site.layout.views(states), site.layout.views(gradients), x, y)
            found[plan.name] = (losses, gradients, plan.outputs(site.layout.views(states), x))
        for got in found.values():
            for own, wanted in zip(got, found["mapped"], strict=True):
                torch.testing.assert_close(own, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-3)


class Watcher(NullObserver):
    def stack_begin(self, stack):
        self.stack, self.seen = stack, []

    def stack_step(self, step, gradients, losses):
        self.seen.append(gradients.clone())

    def stack_end(self, failed):
        self.sums = self.stack.sums() if self.stack.sums else None
        self.outputs = {step: [part.clone() for part in kept] for step, kept in self.stack.outputs().items()}


def stacked_round():
    """Buffers and tables give what plain steps give: unequal clients, groups, faults, fewer clients than before."""
    cuda_round.captured = lambda work, warm_ups, pool: (warm_ups[0](), cuda_round.AtOnce(work))[1]
    cuda_round._seconds = lambda graph: 1.0
    # The statistics' kernels have tests of their own, and would take most of the time here.
    loading.load_kernels = lambda: loading.LoadedKernels(None, "the test asks for it")
    cnn = lab.paper_cnn(channels=(2, 4))
    unequal = lab.Local(epochs=1, batch=4, optimizer=lab.SGD(0.1, momentum=0.9), proximal=0.1, keep_optimizer=True)
    uneven = lab.Local(epochs=2, batch=4)
    kept = lab.Local(iterations=3, batch=4, optimizer=lab.Adam(), clip=lab.Clip(0.5), keep_optimizer=True)
    faults = (lab.frozen_layer(nodes=("c1",), layer="head.weight"), lab.crash(nodes=("c3",), at_step=1))
    decayed = lab.Local(
        iterations=3,
        batch=2,
        accumulate=2,
        optimizer=lab.SGD(0.1, weight_decay=0.3),
        schedule=lab.steps(1),
        clip=lab.Clip(),
    )
    shifted = {"aggregator": "scaffold", "faults": faults, "local": decayed}
    cases = (
        (experiment(cnn), None),
        (experiment(lab.MLP(hidden=(6,)), **shifted), None),
        (experiment(lab.MLP(hidden=(6,)), local=unequal, partition=lab.dirichlet(0.5)), None),
        (experiment(lab.MLP(hidden=(6,)), local=kept, faults=faults), None),
        (experiment(lab.MLP(hidden=(6,))), average),
        (experiment(lab.MLP(hidden=(6,))), pass_to_next),
        (experiment(lab.MLP(hidden=(6,)), local=uneven, partition=lab.dirichlet(0.5)), pass_to_next),
        (experiment(lab.MLP(hidden=(6,)), local=uneven, partition=lab.dirichlet(0.5)), average),
    )
    for e, exchange in cases:
        check_buffers(e, exchange)


def check_buffers(e, exchange):
    """Assert that a round in buffers is the round without them: states, losses, kept moments, statistics."""
    site = Site.of(e)
    start = site.layout.flat(site.module)
    groups = [("c0", "c1", "c2"), ("c3", "c4")]
    found = []
    for buffered in (False, True):
        engine = Engine(site, "stacked", workers=1)
        executor = engine._executor
        executor.buffer_pool = cuda_round.CudaBufferPool(executor) if buffered else None
        watcher = Watcher()
        shifts = 0.1 * torch.randn(2, len(start), generator=torch.Generator().manual_seed(1))
        if not isinstance(e.aggregator, lab.Scaffold):
            shifts = [None, None]
        pairs = zip(groups, shifts, strict=True)
        everybody = [Task(0, nodes, start, exchange=exchange, shift=shift) for nodes, shift in pairs]
        updates = [
            (u.node, u.state.clone(), u.losses.clone())
            for u in executor.train(everybody, watcher, torch.empty(5, len(start)))
        ]
        fewer = [Task(1, groups[0], start, exchange=exchange, shift=shifts[1])]
        updates += [
            (u.node, u.state.clone(), u.losses.clone())
            for u in executor.train(fewer, watcher, torch.empty(3, len(start)))
        ]
        found.append((updates, watcher, executor.kept))
    (plain, seen, remembered), (ours, watcher, kept_there) = found
    assert watcher.outputs.keys() == seen.outputs.keys() != set()
    for step, kept in watcher.outputs.items():
        torch.testing.assert_close(kept, seen.outputs[step], atol=2e-5, rtol=1e-3)
    for (node, state, losses), (other, wanted, expected) in zip(ours, plain, strict=True):
        assert node == other
        torch.testing.assert_close(state, wanted, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-4)
    assert kept_there.keys() == remembered.keys()
    for node, (moments, steps) in kept_there.items():
        assert steps == remembered[node][1]
        torch.testing.assert_close(moments, remembered[node][0], atol=2e-6, rtol=1e-4)
    gradients = torch.stack(watcher.seen).double()
    norms = torch.stack([part.square().sum(2) for part in gradients.split([*_sizes(site)], 2)], 2)
    torch.testing.assert_close(watcher.sums[..., 2], norms, atol=1e-12, rtol=1e-5)


def buffer_pool():
    """Cohorts of ever other sizes do not pile up: buffers go where another can stand in for it."""
    site = Site.of(experiment(lab.MLP(hidden=(6,))))
    pool = cuda_round.CudaBufferPool(Engine(site, "stacked", workers=1)._executor)
    pool.largest = lambda members: members
    for clients in (9, 10, 11, 12, 40, 41, 3, 4, 5, 30):
        assert pool.buffers_for(clients, 3) is pool.buffers_for(clients, 2)
    assert sorted(buffers.clients for buffers in pool._buffers) == [5, 12, 41]
    assert pool.buffers_for(12, 17).steps == 32
    assert sorted(buffers.clients for buffers in pool._buffers) == [5, 12, 41]


def _sizes(site):
    return [view.numel() for view in site.layout.views(site.layout.flat(site.module)).values()]


if __name__ == "__main__":
    for check in (convolution, optimizer, plans, stacked_round, buffer_pool):
        check()
