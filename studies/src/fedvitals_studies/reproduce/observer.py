# SPDX-License-Identifier: Apache-2.0
"""The study's watcher for clients that train as one batch: the cohort's sums as arrays, copied once per round.

`reproduce.measure.CohortSums` makes the same series from a monitor's records. Those cost more than a GPU's training: an
object per client, step and layer. Here the same functions of `probes` measure, and nothing waits for the device before
the round ends. Everything kept is a sum and a count, so that a round in several stacks adds up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedvitals.kernels import sums
from fedvitals.probes.scale import seed_of
from fedvitals.probes.stacked.full_gradient import stacked_full_gradient
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.stacked.nonlinearity import stacked_nonlinearity
from fedvitals.probes.stacked.scale import scale_samples, scale_summaries
from fedvitals.probes.stacked.scale_graph import ScaleGraph
from fedvitals.probes.view import View, evaluation_mode
from fedvitals.protocols import NullObserver
from fedvitals.stack import Stack
from fedvitals.stats import COUNT, SUM, SUM_MAGNITUDES, Array

TEST_BATCH = 4096  # samples of an edge's local tests per forward pass
COLUMNS = [COUNT, SUM, SUM_MAGNITUDES]
CHANGES = ("difference", "difference_absolute")
ALL = "all"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured, and when."""

    rounds: int
    last: int  # the step of a round whose gradients represent it
    iterations: int = 0  # measured one by one: all of a round, or none
    batches: int = 1  # mini-batches in an iteration
    test_loss: bool = False  # each edge's loss on its clients' local tests, after every iteration
    images: int = 32  # per client, at the end of a round
    images_each: int = 0  # the same at every iteration; 0: never
    by_group: bool = False  # per-iteration values for each edge; else for the cohort
    full_gradient: int = 0  # every this many rounds, the gradient over the whole set; 0: never
    full_gradient_each: tuple[int, ...] = ()  # the same after every iteration, in these of each five rounds
    nonlinearity: int = 0  # the same for NLC
    nonlinearity_images: int = 64
    whole_scale: bool = False  # gradient scale of the whole set, estimated, at the end of each round
    exact_rounds: tuple[int, ...] = ()  # exactly, in these


@dataclass(slots=True)
class _Open:
    """A stack that trains. Results of its steps are processed when they are over: few large operations, not many."""

    stack: Stack
    model: StackModel
    view: View  # identifies a moment, for the random streams
    x: Tensor | None
    x_each: Tensor | None
    last: Tensor | None
    heard: Tensor  # [clients], False for those whose results do not arrive
    steps: Tensor | None  # [clients], each one's own number, if they differ
    members: dict[str, Tensor]  # [clients] of 0 and 1, by group
    weights: Tensor  # which layers are weights
    columns: Tensor
    taken: int = 0
    rows: list[Tensor] = field(default_factory=list)  # nine sums of each step, if the host does not keep them
    changes: list[Tensor] = field(default_factory=list)  # [2, clients] of each iteration
    scales: list[Tensor] = field(default_factory=list)  # [2, clients, samples] of each iteration
    tests: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by group, samples and labels
    test_losses: dict[str, list[Tensor]] = field(default_factory=dict)  # by group: at the start, then of each iteration
    full: list[Tensor] = field(default_factory=list)  # [clients, layers, 9] of each iteration, if requested


class Watch(NullObserver):
    """An observer for `lab.rounds`; call `series()` at the end."""

    def __init__(self, wanted: Wanted, local_tests: Mapping[str, tuple[Tensor, Tensor]] | None = None) -> None:
        """local_tests: by client, samples and labels of its local test, if `wanted` asks for losses on them."""
        self._wanted, self._round = wanted, 0
        self._tests = local_tests or {}
        self._open: _Open | None = None
        self._graph = ScaleGraph()  # for the shape measured at every iteration
        self._here: dict[str, Tensor] = {}  # this round's sums, on the device
        self._home: dict[tuple[str, int], Array] = {}  # by measurement and round
        self._bytes: dict[tuple[str, int], int] = defaultdict(int)
        self._groups: dict[int, int] = {}
        self.group_of: dict[str, str] = {}

    # -- called by the federation
    # -----------------------------------------------------------------------------------------

    def round_begin(self, number: int, *_: Any, **__: Any) -> None:
        self._round = number

    def transfer(self, sender: str, receiver: str, bytes: int, *_: Any, **__: Any) -> None:  # noqa: A002
        self._bytes["server" if "server" in (sender, receiver) else "edge", self._round] += bytes

    def event(self, level: str, name: str, message: str, *, data: Any = None, **_: Any) -> None:  # noqa: ARG002
        if name == "groups":
            self._groups[self._round] = len(data)
            for group, nodes in data.items():
                self.group_of |= dict.fromkeys(nodes, group)

    def round_end(self, *_: Any, **__: Any) -> None:
        """Finish the round with a single copy."""
        if self._here:
            flat = torch.cat([part.double().reshape(-1) for part in self._here.values()]).cpu().numpy()
            cuts = np.cumsum([part.numel() for part in self._here.values()])[:-1]
            for (name, part), own in zip(self._here.items(), np.split(flat, cuts), strict=True):
                self._home[name, self._round] = own.reshape(part.shape)
            self._here = {}

    # -- called by the engine
    # ---------------------------------------------------------------------------------------------

    def stack_begin(self, stack: Stack) -> None:
        w, model = self._wanted, StackModel(stack)
        device = model.states.device
        groups = [group or ALL for group in stack.groups] if w.by_group else [ALL] * len(stack.nodes)
        weights = [i for i, (name, _) in enumerate(model.parameters) if name.endswith("weight")]
        self._open = _Open(
            stack,
            model,
            View(stack.module, round_index=self._round),
            self._images(stack, w.images, device),
            self._images(stack, w.images_each, device),
            model.matrix.detach().clone() if w.iterations else None,
            torch.tensor([node not in stack.silent for node in stack.nodes], device=device),
            None if stack.steps is None else torch.tensor(stack.steps, device=device),
            {
                name: torch.tensor([group == name for group in groups], dtype=torch.float64, device=device)
                for name in dict.fromkeys(groups)
            },
            torch.tensor(weights, device=device),
            torch.tensor(COLUMNS, device=device),
        )
        for name in self._open.members if w.test_loss else ():
            own = [self._tests[node] for node, group in zip(stack.nodes, groups, strict=True) if group == name]
            x, y = (torch.cat(parts).to(device) for parts in zip(*own, strict=True))
            self._open.tests[name] = x, y

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:  # noqa: ARG002 - the lab keeps the losses
        open_, w = self._open, self._wanted
        if open_ is None:
            return
        begins = step % w.batches == 0  # an iteration: the effect of the previous one is visible now
        if w.iterations and begins and step == open_.taken:
            if step:
                self._change(open_)
                self._full_gradient_now(open_)
            self._test(open_)
        open_.taken = max(open_.taken, step + 1)
        if open_.stack.sums is None:
            found = sums(open_.model.layers(gradients.detach()), clients=True)
            open_.rows.append(torch.as_tensor(found))
        if open_.x_each is not None and begins and step < w.iterations * w.batches:
            open_.scales.append(self._graph(open_.model, open_.x_each, self._seeds(open_, step)))

    def stack_end(self, failed: Mapping[str, BaseException]) -> None:  # noqa: ARG002 - the study has no failures
        open_, w = self._open, self._wanted
        self._open = None
        if open_ is None or not open_.taken:
            return
        if w.iterations:
            self._change(open_)
            self._full_gradient_now(open_)
            self._test(open_)
            self._iterations(open_)
        self._gradients(open_)
        seeds = self._seeds(open_, open_.taken - 1)
        if open_.x is not None:
            self._scale(open_, open_.x, seeds)
        if w.whole_scale:
            self._whole(open_, seeds)
        if w.full_gradient and self._round % w.full_gradient == 0 and open_.stack.loss is not None:
            self._add("gradient.full", self._layers(open_, self._whole_gradient(open_)[None], open_.heard[None])[0])
        if w.nonlinearity and self._round % w.nonlinearity == 0:
            some = self._images(open_.stack, w.nonlinearity_images, open_.heard.device)
            if some is not None:
                found = torch.as_tensor(stacked_nonlinearity(open_.model, some, seeds)).to(open_.heard.device)
                self._put("nonlinearity.nlc", found, open_.heard)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _images(self, stack: Stack, count: int, device: torch.device) -> Tensor | None:
        return torch.as_tensor(stack.samples(count)[0]).to(device) if count else None

    def _seeds(self, open_: _Open, step: int) -> list[int]:
        """Return the seeds as in a monitor's probe: for the same round, client and step."""
        found, own = [], open_.stack.steps or [step + 1] * len(open_.stack.nodes)
        for node, steps in zip(open_.stack.nodes, own, strict=True):
            open_.view.node, open_.view.step = node, min(step, steps - 1)
            found.append(seed_of(open_.view))
        return found

    def _took(self, open_: _Open, steps: int) -> Tensor:
        """Return [steps, clients]: who took which of the first steps, and whose results arrive."""
        if open_.steps is None:
            return open_.heard.expand(steps, -1)
        return open_.heard & (open_.steps > torch.arange(steps, device=open_.heard.device)[:, None])

    def _put(self, name: str, values: Tensor, who: Tensor) -> None:
        """Add the sum and number of the clients' finite values, [..., 2] of [..., clients]."""
        counted = values.isfinite() & who
        self._add(name, torch.stack([values.where(counted, 0.0).sum(-1), counted.sum(-1).double()], -1))

    def _add(self, name: str, values: Tensor) -> None:
        self._here[name] = self._here[name] + values if name in self._here else values

    def _change(self, open_: _Open) -> None:
        """Record what the last step changed: weights after minus before, signed and absolute."""
        assert open_.last is not None  # noqa: S101 - checked by the caller
        now = open_.model.matrix.detach()
        change = torch.sub(now, open_.last, out=open_.last)
        sizes = torch.linalg.vector_norm(change, 1, dim=1, dtype=torch.float64)
        open_.changes.append(torch.stack([change.sum(1, dtype=torch.float64), sizes]))
        open_.last.copy_(now)

    def _whole_gradient(self, open_: _Open) -> Tensor:
        """Return nine sums of each client's gradient over its whole set, [clients, layers, 9]."""
        loss = open_.stack.loss
        assert loss is not None  # noqa: S101 - checked by the caller
        x, y = (torch.as_tensor(part).to(open_.heard.device) for part in open_.stack.samples(_fewest(open_.stack)))
        return torch.cat([torch.as_tensor(part) for part in stacked_full_gradient(open_.model, x, y, loss)])

    def _full_gradient_now(self, open_: _Open) -> None:
        """Record the same after an iteration, in the rounds in which every iteration has it."""
        if open_.stack.loss is not None and self._round % 5 in self._wanted.full_gradient_each:
            open_.full.append(self._whole_gradient(open_))

    @torch.no_grad()
    def _test(self, open_: _Open) -> None:
        """Record the loss of each group's mean model on its clients' local tests: sum and number of the samples.

        It is as much work as the training: on a GPU in TF32, which changes a loss by less than a thousandth.
        """
        for group, (x, y) in open_.tests.items():
            members = open_.members[group].nonzero().flatten()
            states = open_.stack.states.index_select(0, members).mean(0, keepdim=True, dtype=torch.float64)
            model = open_.model.with_states(states.to(open_.stack.states.dtype))
            weights = {name: tensor[0] for name, tensor in model.tensors(slice(0, 1)).items()}
            with evaluation_mode(model.module), torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
                outputs = [functional_call(model.module, weights, (part,)) for part in x.split(TEST_BATCH)]
            loss = torch.nn.functional.cross_entropy(torch.cat(outputs).double(), y, reduction="sum")
            open_.test_losses.setdefault(group, []).append(torch.stack([loss, loss.new_tensor(float(len(y)))]))

    def _iterations(self, open_: _Open) -> None:
        """Add changes and test losses of each group, gradient scale and whole-set gradients, of every iteration."""
        steps = min(self._wanted.iterations, len(open_.changes))
        who = self._took(open_, steps * self._wanted.batches)[:: self._wanted.batches]
        for group, losses in open_.test_losses.items():
            self._add(f"test_loss/{group}", torch.stack(losses))
        if open_.full:
            self._add("iteration.gradient.full", self._layers(open_, torch.stack(open_.full), who[: len(open_.full)]))
        changes = torch.stack(open_.changes[:steps]) * who[:, None]
        for group, members in open_.members.items():
            self._add(f"change/{group}", (changes * members).sum(2))
        if open_.scales:
            found = scale_summaries(torch.stack(open_.scales, 1))["scale.gsc"]
            self._put("iteration.gsc", found, who[: len(open_.scales)])

    def _gradients(self, open_: _Open) -> None:
        w, stack = self._wanted, open_.stack
        rows = stack.sums() if stack.sums is not None else torch.stack(open_.rows)
        who = self._took(open_, len(rows))
        if w.iterations:
            ends = slice(w.batches - 1, w.iterations * w.batches, w.batches)
            self._add("iteration.gradient", self._layers(open_, rows[ends], who[ends]))
        if w.last < len(rows):
            self._add("gradient", self._layers(open_, rows[w.last, None], who[w.last, None])[0])

    def _layers(self, open_: _Open, rows: Tensor, who: Tensor) -> Tensor:
        """Return [steps, weight layers, 3] of the nine sums [steps, clients, layers, 9], summed over the clients."""
        chosen = rows.index_select(2, open_.weights).index_select(3, open_.columns).double()
        return chosen.where(who[:, :, None, None], 0.0).sum(1)

    def _scale(self, open_: _Open, x: Tensor, seeds: Sequence[int]) -> None:
        samples = self._graph if open_.x_each is not None and x.shape == open_.x_each.shape else scale_samples
        found = scale_summaries(samples(open_.model, x, seeds))
        for name in ("scale.gsc", "scale.gsc_median", "scale.gsc_spread", "scale.sensitivity"):
            self._put(name, found[name], open_.heard)
        for name in ("scale.zero_samples", "scale.nonfinite_samples"):
            self._put(name, found[name] / found["scale.images"], open_.heard)

    def _whole(self, open_: _Open, seeds: Sequence[int]) -> None:
        """Measure over all images that every client has: the paper's form, estimated, and sometimes exactly."""
        x = self._images(open_.stack, _fewest(open_.stack), open_.heard.device)
        if x is None:
            return
        found = scale_summaries(scale_samples(open_.model, x, seeds))
        self._put("scale.gsc_whole", found["scale.gsc"], open_.heard)
        self._put("scale.sensitivity_whole", found["scale.sensitivity"], open_.heard)
        if self._round in self._wanted.exact_rounds:
            exact = scale_summaries(scale_samples(open_.model, x, seeds, exact=True))
            self._put("scale.gsc_exact", exact["scale.gsc"], open_.heard)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def series(self) -> dict[str, Any]:
        """Return the series by name, as `CohortSums.series`."""
        w, rounds = self._wanted, range(self._wanted.rounds)
        found: dict[str, Any] = {}
        names = [
            "scale.gsc", "scale.gsc_median", "scale.gsc_spread", "scale.sensitivity", "scale.zero_samples",
            "scale.nonfinite_samples", *(["nonlinearity.nlc"] if w.nonlinearity else []),
        ]  # fmt: skip
        if w.whole_scale:
            names += ["scale.gsc_whole", "scale.sensitivity_whole", *(["scale.gsc_exact"] if w.exact_rounds else [])]
        for name in names:
            found[name] = [_mean(self._home.get((name, r))) for r in rounds]
        found |= _layered([self._home.get(("gradient", r)) for r in rounds], "gradient")
        if w.full_gradient:
            found |= _layered([self._home.get(("gradient.full", r)) for r in rounds], "gradient.full")
        if w.iterations:
            found |= self._per_iteration()
        groups_now, known = [], 1
        for r in rounds:
            known = self._groups.get(r, known)
            groups_now.append(known)
        found["groups"] = groups_now
        return found | {f"bytes.{where}": [self._bytes[where, r] for r in rounds] for where in ("server", "edge")}

    def _per_iteration(self) -> dict[str, Any]:
        w, rounds = self._wanted, range(self._wanted.rounds)

        def each(name: str) -> list[Array | None]:
            """Return values of all iterations of all rounds; None where a round has fewer, or none."""
            own = [self._home.get((name, r), ()) for r in rounds]
            return [part[step] if step < len(part) else None for part in own for step in range(w.iterations)]

        found: dict[str, Any] = {}
        if w.images_each:
            found["iteration.gsc"] = [_mean(pair) for pair in each("iteration.gsc")]
        found |= _layered(each("iteration.gradient"), "iteration.gradient")
        if w.full_gradient_each:
            found |= _layered(each("iteration.gradient.full"), "iteration.gradient.full")
        if w.test_loss:
            edges = sorted({name.partition("/")[2] for name, _ in self._home if name.startswith("test_loss/")})
            # The first of a round is that of its initial model.
            losses = {edge: [self._home[f"test_loss/{edge}", r] for r in rounds] for edge in edges}
            found["start.test_loss"] = {edge: [_mean(own[0]) for own in losses[edge]] for edge in edges}
            found["iteration.test_loss"] = {
                edge: [_mean(pair) for own in losses[edge] for pair in own[1:]] for edge in edges
            }
        groups = sorted({name.partition("/")[2] for name, _ in self._home if name.startswith("change/")})
        for column, name in enumerate(CHANGES):
            found[f"iteration.{name}"] = {
                group: [math.nan if own is None else float(own[column]) for own in each(f"change/{group}")]
                for group in groups
            }
        return found


def _mean(pair: Array | None) -> float:
    return float(pair[0] / pair[1]) if pair is not None and pair[1] else math.nan


def _layered(rows: Sequence[Array | None], prefix: str) -> dict[str, Any]:
    layers = max((len(own) for own in rows if own is not None), default=0)
    found: dict[str, Any] = {f"{prefix}.mean": {}, f"{prefix}.magnitude": {}}
    for layer in range(layers):
        for column, name in ((1, "mean"), (2, "magnitude")):
            found[f"{prefix}.{name}"][str(layer + 1)] = [
                math.nan if own is None else float(own[layer, column] / max(1.0, own[layer, 0])) for own in rows
            ]
    return found


def _fewest(stack: Stack) -> int:
    """Return how many samples every client has: all of them, if they were distributed equally."""
    return min((len(own) for own in stack.labels or ()), default=0)
