# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a training are: the model, its buffers, gradients, the optimiser's state, activations.

Storages are counted, each once: views, tied weights and tensors saved twice for the backward pass share theirs.

Activations are what autograd holds at the moment when the backward pass begins. They are read from its graph, starting
at the loss, without hooks, so neither a number nor an error of the training can differ. Where the user keeps
activations by hooks (checkpointing, saving to the CPU), autograd holds none there, and none are counted.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedvitals.model_hooks import Hook, can_be_hooked

SHAPES = 64  # of inputs whose activations are remembered
MOST_NODES = 100_000  # of a graph that are visited
MOST_DEPTH = 4  # of lists and mappings in an optimiser's state

Seen = set[int]  # addresses of storages that have been counted


def storage_bytes(tensors: Iterable[Any], seen: Seen) -> int:
    """Return the bytes of the storages behind these tensors, except those in `seen`, to which they are added."""
    total = 0
    for tensor in tensors:
        for plain in (tensor,) if tensor.layout is torch.strided else _dense_parts(tensor):
            if plain.device.type == "meta":
                continue
            try:
                storage = plain.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # a wrapper around other tensors has no memory of its own
                continue
            if address not in seen:
                seen.add(address)
                total += storage.nbytes()
    return total


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that a sparse tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the public ones refuse a gradient not yet coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return ()


def shares(model: Any, optimizers: Iterable[Any]) -> dict[str, int]:
    """Return the current bytes of model, buffers, gradients and optimiser state, by name.

    Gradients that have been set to None since the last step are counted at their future size: as large as the
    parameters that an optimiser acts on.
    """
    seen: Seen = set()
    parameters = list(model.parameters())
    sizes = {"model": storage_bytes(parameters, seen), "buffers": storage_bytes(model.buffers(), seen)}
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizers = list(optimizers)
    sizes["gradients"] = storage_bytes(gradients, seen)
    if not gradients and optimizers:
        own = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        sizes["gradients"] = sum(p.numel() * p.element_size() for p in own.values() if p.requires_grad)
    states = (value for o in optimizers for state in o.state.values() for value in tensors_in(state))
    sizes["optimizer"] = storage_bytes(states, seen)
    return sizes


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif depth < MOST_DEPTH:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for tensor in inner:
            yield from tensors_in(tensor, depth + 1)


# -- activations ------------------------------------------------------------------------------------------------------


def saved_bytes(roots: Iterable[Tensor], seen: Seen) -> int | None:
    """Return the bytes autograd holds for the backward pass from these tensors, except `seen`; None if too large."""
    total = 0
    for number, node in enumerate(graph_nodes(roots), 1):
        if number > MOST_NODES:
            return None
        total += storage_bytes(tensors_saved_by(node), seen)
    return total


def graph_nodes(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph that computed these tensors, each once."""
    met: set[Any] = set()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in met:
            met.add(node)
            yield node
            waiting.extend(after for after, _ in node.next_functions if after is not None and after not in met)


def tensors_saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that one node of a graph saves for the backward pass; none that a user's hook would create."""
    kind = type(node)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in names:
        held = getattr(node, name, None)
        for saved in held if isinstance(held, tuple | list) else (held,):
            # The user's hook would run, and may compute: what it returns is not held now.
            if saved is not None and getattr(saved, "unpack_hook", saved) is None:
                try:
                    tensor = saved.data
                except RuntimeError:  # freed, or changed in place since: the user's backward pass will raise it
                    continue
                if isinstance(tensor, Tensor):
                    yield tensor
    if hasattr(node, "__dict__"):  # a user-defined function may keep tensors on its context
        yield from tensors_in(vars(node), MOST_DEPTH - 2)


_names: dict[type, tuple[str, ...]] = {}  # of what each kind of node saves


class StepWatch:
    """Waits for the batch of a client's first step and, if its shape is new, for the beginning of the backward pass.

    `known`: the bytes of activations by model and shape of the input, which are measured once. `weights`: the model's
    number of weights, which distinguishes it from others of its type.
    """

    def __init__(self, known: dict[Any, int], model: Any, weights: int) -> None:
        self.batch: int | None = None  # samples
        self.bytes: int | None = None
        self._known = known
        self._key: Any = weights
        self._outputs: list[weakref.ref[Tensor]] = []
        self._model = weakref.ref(model)
        self._forget: list[Callable[[], None]] = []
        if can_be_hooked(model):
            hook = Hook(self._forward, self._failed)
            self._forget.append(model.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for forget in self._forget:
            forget()
        self._forget.clear()

    def _forward(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self.remove()
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        if not tensors or not tensors[0].dim():
            return
        self.batch = int(tensors[0].shape[0])
        self._key = (type(model), self._key, model.training, *((t.shape, t.dtype) for t in tensors))
        self.bytes = self._known.get(self._key)
        if self.bytes is None:
            hook = Hook(self._answered, self._failed)
            self._forget = [model.register_forward_hook(hook).remove, tell_of_backward(self)]

    def _answered(self, _model: Any, _inputs: Any, output: Any) -> None:
        """Record what the model's output saves; if `torch.autograd.backward` is never called, that is all that is
        known.
        """
        tensors = list(tensors_in(output))
        self._outputs = [weakref.ref(tensor) for tensor in tensors]
        self._take(tensors)

    def _failed(self, _error: Exception) -> None:
        """Give up on tensors without a size or a storage: only a metric is missing then."""
        self.remove()
        self.bytes = None

    def backward_begins(self, roots: Any) -> None:
        """Called with the loss, or several, before the backward pass."""
        self.remove()
        try:
            self._take(list(tensors_in(roots)))
        except Exception:  # noqa: BLE001 - as in `_failed`
            self.bytes = None

    def _take(self, roots: list[Tensor]) -> None:
        model = self._model()
        if model is None:
            return
        seen: Seen = set()
        storage_bytes(model.parameters(), seen)
        storage_bytes(model.buffers(), seen)
        total = saved_bytes(roots, seen)
        alive = [tensor for tensor in (reference() for reference in self._outputs) if tensor is not None]
        if total is not None:
            if len(self._known) >= SHAPES:
                self._known.pop(next(iter(self._known)))
            self.bytes = self._known[self._key] = total + storage_bytes([*roots, *alive], seen)


_lock = threading.Lock()
_waiting: dict[int, StepWatch] = {}  # by thread
_replaced: list[tuple[Any, Any]] = []  # our function, and the one that it replaces


def tell_of_backward(watch: StepWatch) -> Callable[[], None]:
    """Call `watch.backward_begins` before this thread's next backward pass. Returns the function that ends it.

    torch has no hook for that. Its function is replaced while a watch is waiting, which is for one step of a shape that
    was not seen before, and then restored.
    """
    thread = threading.get_ident()
    module: Any = torch.autograd
    with _lock:
        if not _waiting:
            _replaced.append((_watched(module.backward), module.backward))
            module.backward = _replaced[-1][0]
        _waiting[thread] = watch

    def forget() -> None:
        with _lock:
            if _waiting.get(thread) is not watch:
                return
            del _waiting[thread]
            if not _waiting:
                ours, original = _replaced.pop()
                if module.backward is ours:  # otherwise another replacement calls ours, which now does nothing
                    module.backward = original

    return forget


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _waiting.get(threading.get_ident())
        if watch is not None:
            watch.backward_begins(tensors)
        return original(tensors, *args, **kwargs)

    return backward
