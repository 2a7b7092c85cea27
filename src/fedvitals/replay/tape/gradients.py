# SPDX-License-Identifier: Apache-2.0
"""Gradients of chosen clients on the tape, as the optimiser was about to use them: on request, at privacy level 4.

    tape = fv.Tape()
    fv.Monitor("runs.db", privacy=4, tape=tape, probes=["standard", tape.gradients(nodes=["c7"], rounds=5)])

A probe runs and writes where the client trains, which may be another process. Clients that train stacked have no model
of their own to look at; the replay computes their gradients again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fedvitals.protocols import Moment
from fedvitals.replay.tape.digests import Tensors, digest_of
from fedvitals.replay.tape.objects import StateFiles, replace_file
from fedvitals.replay.tape.unpack_limits import read_note

PRIVACY_LEVEL = 4  # of privacy: tensors, on the site where they were made
FOLDER = "gradients"


@dataclass
class GradientFolder:
    """The tape's folder and budget, once it is open; sent along to worker processes."""

    folder: str | None = None
    budget: int = 0


@dataclass
class GradientTape:
    """The probe that writes gradients to the tape; its schedule is `wants`, which includes `steps`."""

    place: GradientFolder
    nodes: Collection[str] | None  # None: all
    rounds: int  # every so many
    steps: Callable[[Moment], bool]
    _objects: StateFiles | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_objects": None}

    def wants(self, moment: Moment) -> bool:
        """Return whether the gradients of this client's step are to be kept."""
        chosen = (self.nodes is None or moment.node in self.nodes) and (moment.round or 0) % self.rounds == 0
        return chosen and self.place.folder is not None and self.steps(moment)

    def __call__(self, view: Any) -> Mapping[str, Any]:
        """Write the gradients to this site's tape and return no metrics. Gradients over the budget are left out."""
        named = zip(view.named_parameters, view.gradients, strict=True)
        tensors = {name: gradient.detach() for (name, _), gradient in named if gradient is not None}
        if self.place.folder is None or not tensors:
            return {}
        folder = Path(self.place.folder)
        if self._objects is None:
            self._objects = StateFiles(folder / "objects")
        if self._objects.bytes < self.place.budget:
            digest = digest_of(tensors)
            self._objects.put(digest, tensors)
            index = folder / FOLDER
            index.mkdir(exist_ok=True)
            note = {"round": view.round, "node": view.node, "step": view.step, "digest": digest}
            replace_file(index / f"{digest}-{view.round}-{view.step}.json", msgspec.json.encode(note))
        return {}


@dataclass(frozen=True, slots=True)
class RecordedGradient:
    """One gradient on the tape."""

    round: int
    node: str
    step: int
    digest: str


def recorded_gradients(folder: Path) -> list[RecordedGradient]:
    """Return the gradients that a tape holds, by round, node and step."""
    gradients = []
    for file in (folder / FOLDER).glob("*.json"):
        try:
            gradients.append(msgspec.json.decode(read_note(file), type=RecordedGradient))
        except (OSError, ValueError, msgspec.MsgspecError):  # half written, or not ours
            continue
    return sorted(gradients, key=lambda gradient: (gradient.round, gradient.node, gradient.step))


def read_gradient(folder: Path, round_index: int, node: str, step: int) -> Tensors | None:
    """Return the gradients of one client's local step; None if the tape does not have them."""
    for gradient in recorded_gradients(folder):
        if (gradient.round, gradient.node, gradient.step) == (round_index, node, step):
            return StateFiles(folder / "objects").get(gradient.digest)
    return None
