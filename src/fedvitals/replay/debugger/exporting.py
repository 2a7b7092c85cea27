# SPDX-License-Identifier: Apache-2.0
"""Export what is shown, or a whole state, to a file: .safetensors, .csv or .json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch

from fedvitals import plain_json
from fedvitals.errors import ConfigError
from fedvitals.replay.debugger.printing import parse_request, print_words, required_layers
from fedvitals.replay.tape.digests import Tensors

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

TENSORS, TABLES = (".safetensors",), (".csv", ".json")


def export_file(session: Session, path: Path, words: Sequence[str]) -> Path:
    """Write what the words name (default: what was shown last, or the state) to a file, and return its path."""
    if path.suffix not in (*TENSORS, *TABLES):
        known = ", ".join((*TENSORS, *TABLES))
        raise ConfigError(f"A file to export to ends in one of {known}; got '{path.name}'.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no folder '{path.parent}' to write {path.name} into.")
    try:
        if path.suffix in TENSORS:
            path.write_bytes(safetensors.torch.save(_tensors(session, list(words) or ["state"])))
        else:
            path.write_text(_text(session, words, path.suffix), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error}") from error
    return path


def _text(session: Session, words: Sequence[str], suffix: str) -> str:
    output = print_words(session, words) if words and words != ["table"] else session.last
    if output is None:
        raise ConfigError("Nothing has been shown yet. Say what:  export update c7 update.csv.")
    if suffix == ".csv":
        return output.as_csv()
    return json.dumps(plain_json.shown(output.as_json()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _tensors(session: Session, words: Sequence[str]) -> dict[str, Any]:
    """Return the tensors to export by name: all of them, or a layer's."""
    request = parse_request(session, words[1:], free=False)
    tensors = _tensors_of(session, words[0], request.node)
    names = tensors if request.layer is None else required_layers(request.layer, tensors)
    # safetensors refuses tensors that share memory, and such as have holes
    return {name.strip("/"): tensors[name].detach().cpu().contiguous().clone() for name in names}


def _tensors_of(session: Session, noun: str, node: str | None) -> Tensors:
    """Return all parts of a state, each under its own name; or the tensors of a model, an update, a gradient."""
    if noun == "state":
        parts = session.states.state(session.round)
        return {f"{part}/{name}": t for part, held in parts.items() for name, t in held.items()}
    if noun == "weight" and node is None:
        return session.states.model(session.round)
    if node is None:
        raise ConfigError(f"Whose {noun}? Name a client:  export {noun} c7 FILE.safetensors.")
    if noun == "update":
        tensors = session.states.update(session.round, node)
    elif noun in ("weight", "gradient"):
        step = session.at(node)
        tensors = dict((step.weights if noun == "weight" else step.gradients) or {})
    else:
        raise ConfigError(f"A {noun} is no tensor. To .safetensors go: state, weight, update, gradient.")
    if tensors is None:
        raise ConfigError(f"Nothing of use came from {node} in round {session.round}.")
    return tensors
