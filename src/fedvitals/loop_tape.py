# SPDX-License-Identifier: Apache-2.0
"""Records a plain loop on a tape: the monitor sees its models begin and end, so the loop needs no code of its own.

It keeps the global model before and after each round, each client's model after its training, and, before each of
these, the states of this process's random generators. Tensors are copied on the training thread, because the loop
modifies them later, into memory that is reused; hashing and writing are done by the tape's own thread.
"""

from __future__ import annotations

import base64
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.errors import StoreError, text_of
from fedvitals.protocols import Message, Node, TapeRecorder

if TYPE_CHECKING:
    from torch import Tensor

RANDOM = "random"  # key of the generators' states, in the notes of a round and of a client
DELTA = "delta"  # marks an update that is a difference rather than a state
SPARE_BYTES = 256 << 20  # of unused copies of one kind; beyond it memory is freed
Tell = Callable[[str, str, str], None]


@dataclass(slots=True)
class _Training:
    """A client that is training."""

    round: int
    model: Any
    random: dict[str, Any]
    group: str | None = None
    losses: list[float] = field(default_factory=list)
    samples: float | None = None


class LoopTape:
    """Passes a loop's states to a tape. Does nothing before `open`, or if the host passes its states itself."""

    def __init__(self) -> None:
        self._recorder: TapeRecorder | None = None
        self._tell: Tell = lambda *_: None
        self._number: int | None = None  # of the open round
        self._model: Any = None
        self._names: list[str] = []  # of the global model's parameters
        self._described: dict[str, Any] = {}
        self._training: dict[Node, _Training] = {}
        self._metrics: dict[str, float] = {}
        self._notes: dict[str, Any] = {}
        self._came: set[Node] = set()
        self._warned: set[str] = set()
        self._copies = TensorCopies()

    def open(self, recorder: TapeRecorder, tell: Tell) -> None:
        """Start recording to `recorder`; `tell` records an event (level, name, message)."""
        self._recorder, self._tell = recorder, tell

    def leave_to_host(self) -> None:
        """Stop recording: the host has asked for the tape and records on it itself, as the lab and Flower do."""
        self._recorder = self._number = self._model = None

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round_begin(self, number: int, state: Any) -> None:
        """Record the global model before a round; a round without one is not taped."""
        self._number = None
        if self._recorder is None:
            return
        tensors = self._copy(state)
        if tensors is None:
            self._warn(f"Round {number} has no global model, so it cannot be replayed: monitor.round({number}, model).")
            return
        self._describe(tensors.values())
        self._number, self._model = number, state
        self._names = [name for name, _ in state.named_parameters()] if hasattr(state, "named_parameters") else []
        self._metrics, self._notes, self._came = {}, {}, set()
        self._recorder.begin(number, {"model": tensors}, {RANDOM: random_states()})

    def failed(self, error: BaseException) -> None:
        """Keep a round that was left by an exception as it is, so that it can be examined."""
        self._notes["failed"] = f"{type(error).__name__}: {text_of(error)}"[:1000]

    def round_end(self, number: int, state: Any, metrics: Mapping[str, float]) -> None:
        """Record the global model after the round, with its metrics."""
        recorder, model = self._recorder, self._model
        opened, self._number, self._model = self._number, None, None
        self._training.clear()
        if recorder is None or opened != number:
            return
        after = self._copy(state) or self._copy(model)
        own_metrics = {name: float(value) for name, value in metrics.items()}
        recorder.end(number, {"model": after or {}}, self._notes, {**self._metrics, **own_metrics})
        recorder.gate(number)

    def logged(self, node: Node | None, name: str, value: float) -> None:
        """Record what the loop itself logs: a client's losses, step by step, and metrics of the round."""
        training = self._training.get(node or "")
        if training is None:
            self._metrics |= {name: value} if node is None else {}
        elif name == "loss":
            training.losses.append(value)
        elif name == "samples":
            training.samples = value

    # -- clients ------------------------------------------------------------------------------------------------------

    def client_begin(self, node: Node, model: Any, group: str | None) -> None:
        """Note that a client begins to train, and the states of the random generators."""
        if self._recorder is not None and self._number is not None:
            self._training[node] = _Training(self._number, model, random_states(), group)

    def client_end(self, node: Node, results: Iterable[tuple[str, Any, Any]], outcome: BaseException | None) -> None:
        """Record a client's model after its training, or why it failed."""
        training = self._training.pop(node, None)
        if training is None or self._recorder is None or training.round != self._number:
            return
        tensors = None if outcome is not None else self._copy(training.model)
        if tensors is None and outcome is None:
            return  # no model of its own; `sent` may provide its update
        self._describe((tensors or {}).values())
        measured = [float(value) for name, value, _ in results if name == "samples"]
        weight = training.samples if training.samples is not None else (measured or [1.0])[-1]
        import torch  # noqa: PLC0415 - a monitor without a tape does not need it

        error = None if outcome is None else f"{type(outcome).__name__}: {outcome}"[:1000]
        losses = torch.tensor(training.losses) if training.losses else None
        notes = {RANDOM: training.random}
        self._came.add(node)
        self._recorder.messages(
            self._number,
            [Message(node, tensors, weight, error is None, training.group, losses=losses, error=error, notes=notes)],
        )

    def sent(self, number: int, updates: Mapping[Node, Any], excluded: Sequence[Node]) -> None:
        """Record updates held by the host for clients whose models were not seen here; `excluded` ones are left out."""
        if self._recorder is None or self._number != number:
            return
        self._notes |= {"excluded": [*excluded]} if excluded else {}
        messages = [
            Message(node, self._named(update), 1.0, node not in excluded, notes={"kind": DELTA})
            for node, update in updates.items()
            if node not in self._came
        ]
        self._came |= {message.node for message in messages}
        if messages:
            self._recorder.messages(number, messages)

    def _named(self, update: Any) -> dict[str, Tensor]:
        import torch  # noqa: PLC0415

        pieces = [torch.as_tensor(piece).detach() for piece in update]
        names = self._names if len(self._names) == len(pieces) else [str(i) for i in range(len(pieces))]
        return self._copies(dict(zip(names, pieces, strict=True)))

    def _copy(self, state: Any) -> dict[str, Tensor] | None:
        """Return a copy like that of `tensors_of`, in memory that is reused."""
        tensors = _references(state)
        return None if tensors is None else self._copies(tensors)

    # -- recorded once ------------------------------------------------------------------------------------------------

    def _describe(self, tensors: Iterable[Tensor]) -> None:
        """Record what bitwise results depend on. With CUDA, they need not be reproducible."""
        import torch  # noqa: PLC0415

        devices = {tensor.device.type for tensor in tensors} - {"cpu"}
        device = next(iter(sorted(devices)), self._described.get("device", "cpu"))
        description = {"kind": "loop", "device": device, "threads": torch.get_num_threads()}
        if description != self._described and self._recorder is not None:
            self._described = description
            self._recorder.describe(description)

    def _warn(self, text: str) -> None:
        if "no model" not in self._warned:
            self._warned.add("no model")
            self._tell("warning", "tape.no_model", text)


def tensors_of(state: Any) -> dict[str, Tensor] | None:
    """Return a copy of a module's state or of tensors by name, ignoring anything else; None for other objects."""
    tensors = _references(state)
    return None if tensors is None else {name: tensor.clone() for name, tensor in tensors.items()}


def _references(state: Any) -> dict[str, Tensor] | None:
    """Return the same tensors without copying them."""
    import torch  # noqa: PLC0415

    held = state.state_dict() if hasattr(state, "state_dict") else state
    if not isinstance(held, Mapping):
        return None
    tensors = {
        str(name): torch.as_tensor(value).detach()
        for name, value in held.items()
        if isinstance(value, torch.Tensor | np.ndarray)
    }
    return tensors or None


# -- copies -----------------------------------------------------------------------------------------------------------


class _PooledCopy(dict[str, "Tensor"]):
    """Copied tensors, whose memory returns to its pool when this object is freed."""

    def __init__(self, tensors: Mapping[str, Tensor], pool: deque[dict[str, Tensor]]) -> None:
        super().__init__(tensors)
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(dict(self))


class TensorCopies:
    """Copies tensors by name for a tape.

    On the CPU, memory is reused once the tape has released a copy, because in a large model allocating memory takes
    five times as long as copying.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], deque[dict[str, Tensor]]] = {}  # unused copies

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies. They are valid as long as the dictionary itself is referenced."""
        import torch  # noqa: PLC0415

        if not all(tensor.is_cpu for tensor in tensors.values()):  # a device's allocator is a pool already
            return {name: tensor.clone() for name, tensor in tensors.items()}
        kind = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        if kind not in self._pools:
            size = sum(tensor.nbytes for tensor in tensors.values())
            self._pools[kind] = deque(maxlen=max(1, SPARE_BYTES // max(1, size)))
        pool = self._pools[kind]
        try:
            spare = pool.pop()
        except IndexError:
            with torch.inference_mode(mode=False):  # memory allocated in inference mode cannot be written outside it
                spare = {name: tensor.clone() for name, tensor in tensors.items()}
        else:
            for name, tensor in tensors.items():
                spare[name].copy_(tensor)
        return _PooledCopy(spare, pool)


# -- random generators ------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of torch, NumPy and Python, without changing them.

    The result is JSON except for bytes, which the tape's thread encodes as base64.
    """
    import torch  # noqa: PLC0415

    states_by_library: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states_by_library["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    version, words, gauss = random.getstate()
    states_by_library["python"] = [version, _words(words), gauss]
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the loop's own generator
    if kind == "MT19937":
        states_by_library["numpy"] = [np.asarray(keys, "<u4").tobytes(), int(place), int(has_gauss), float(cached)]
    return states_by_library


def set_random_states(states_by_library: Mapping[str, Any]) -> None:
    """Set the random generators to what `random_states` returned. StoreError if that is malformed."""
    import torch  # noqa: PLC0415

    try:
        torch.set_rng_state(torch.from_numpy(_numbers(states_by_library["torch"], "u1", torch.get_rng_state().numel())))
        if "cuda" in states_by_library and torch.cuda.is_available():
            states = [torch.from_numpy(_numbers(encoded, "u1", None)) for encoded in states_by_library["cuda"]]
            torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])
        version, words, gauss = states_by_library["python"]
        random.setstate((version, tuple(_numbers(words, "<u4", 625).tolist()), gauss))
        if "numpy" in states_by_library:
            keys, place, has_gauss, cached = states_by_library["numpy"]
            numpy_state = ("MT19937", _numbers(keys, "<u4", 624), _place(place), has_gauss, cached)
            np.random.set_state(numpy_state)  # noqa: NPY002
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(f"The state of the random generators on the tape cannot be read: {error}") from error


def _words(words: Sequence[int]) -> bytes:
    held = array("I", words)
    if sys.byteorder == "big":
        held.byteswap()
    return held.tobytes()


def _place(position: Any) -> int:
    """Return a checked position: NumPy does not check it, and would read beyond its own memory."""
    if position not in range(625):
        raise ValueError(f"place {position} of 624")
    return int(position)


def _numbers(encoded: str | bytes, kind: str, length: int | None) -> np.ndarray[Any, Any]:
    held = encoded if isinstance(encoded, bytes) else base64.b64decode(encoded, validate=True)
    numbers = np.frombuffer(held, kind).copy()
    if length is not None and len(numbers) != length:
        raise ValueError(f"{length} numbers were expected, and {len(numbers)} are there")
    return numbers
