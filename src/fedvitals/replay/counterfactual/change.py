# SPDX-License-Identifier: Apache-2.0
"""The change of a what-if, parsed from text: «drop c7; clip 1.5», «learning_rate / 10», «no faults»."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab import toml
from fedvitals.lab.description import kind_of
from fedvitals.lab.experiment import AGGREGATORS, Experiment, kinds_of
from fedvitals.records import Action, Where
from fedvitals.replay.player.player import action_of
from fedvitals.replay.tape.reader import TapeReader

EXAMPLES = (
    "drop c7",
    "learning_rate / 10",
    "server_rate / 2",
    "aggregator median",
    "aggregator trimmed_mean fraction=0.2",
    "clip 1.5",
    "weight c7 0.5",
    "no faults",
)
RATE = re.compile(r"(learning[_ ]rate|client[_ ]rate|server[_ ]rate)\s*([/÷*x×])\s*(\S+)")


@dataclass(frozen=True)
class WhatIfChange:
    """A change of a run; the default changes nothing. `client_rate` and `server_rate` are factors, `clip` the
    largest update norm.
    """

    drop: tuple[str, ...] = ()  # clients, or groups
    client_rate: float = 1.0
    server_rate: float = 1.0
    aggregator: Any = None  # a rule of the lab, or its name
    clip: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # factors of what clients count
    no_faults: bool = False
    text: str = ""

    def __post_init__(self) -> None:
        for name, value in (("client_rate", self.client_rate), ("server_rate", self.server_rate)):
            _positive(name, value)
        if self.clip is not None:
            _positive("clip", self.clip)
        for node, factor in self.weights.items():
            _positive(f"weight of {node}", factor)
        object.__setattr__(self, "drop", (self.drop,) if isinstance(self.drop, str) else tuple(self.drop))
        if isinstance(self.aggregator, str):
            object.__setattr__(self, "aggregator", _aggregator(self.aggregator.split()))
        object.__setattr__(self, "text", self.text or self._words())

    @property
    def nothing(self) -> bool:
        """Return whether nothing is changed."""
        return self == WhatIfChange(text=self.text)

    def check(self, experiment: Experiment, groups: Sequence[str] = ()) -> None:
        """Raise ConfigError if a named client or group does not exist, or if no client is left."""
        for node in (*self.drop, *self.weights):
            if node not in (*experiment.nodes, *groups):
                raise ConfigError(unknown("client", node, (*experiment.nodes, *groups)))
        if not set(experiment.nodes) - set(self.drop):
            raise ConfigError("A federation without any client has nothing to aggregate: leave at least one in.")

    def experiment(self, experiment: Experiment) -> Experiment:
        """Return the experiment with what can only be changed there: its aggregation rule and its faults."""
        fields: dict[str, Any] = {}
        if self.aggregator is not None:
            fields["aggregator"] = self.aggregator
        if self.no_faults:
            fields["faults"] = ()
        return msgspec.structs.replace(experiment, **fields) if fields else experiment

    def actions(self, round_index: int) -> list[Action]:
        """Return the rest of the change as corrections in force in a round."""
        corrections: list[tuple[str, str | None, dict[str, Any]]] = [("quarantine", node, {}) for node in self.drop]
        corrections += [("reweight", node, {"factor": float(factor)}) for node, factor in self.weights.items()]
        if self.clip is not None:
            corrections.append(("clip_updates", None, {"norm": float(self.clip)}))
        for kind in ("client_rate", "server_rate"):
            if (factor := getattr(self, kind)) != 1:
                corrections.append((kind, None, {"factor": float(factor)}))
        return [
            Action(Where("", round_index), 0.0, CHANGE_FINDING, kind, target, arguments)
            for kind, target, arguments in corrections
        ]

    def _words(self) -> str:
        parts = [f"drop {', '.join(self.drop)}"] if self.drop else []
        parts += [f"weight {node} {factor:g}" for node, factor in self.weights.items()]
        parts += [f"clip {self.clip:g}"] if self.clip is not None else []
        parts += [f"learning_rate * {self.client_rate:g}"] if self.client_rate != 1 else []
        parts += [f"server_rate * {self.server_rate:g}"] if self.server_rate != 1 else []
        parts += [f"aggregator {_rule_text(self.aggregator)}"] if self.aggregator is not None else []
        parts += ["no faults"] if self.no_faults else []
        return "; ".join(parts) or "nothing"


CHANGE_FINDING = "what if"  # in place of a finding: an action of a change


def parse(text: str) -> WhatIfChange:
    """Return the change that a text describes; several are separated by «;» or «and»."""
    parts: dict[str, Any] = {"weights": {}, "drop": ()}
    for part in re.split(r";|\band\b", text):
        if part.strip():
            _parse_part(part.strip(), parts)
    return WhatIfChange(**parts)


def change_from(change: str | WhatIfChange | None = None, **parts: Any) -> WhatIfChange:
    """Return a change from a text, a `WhatIfChange`, or its parts: change_from("drop c7"), change_from(drop=["c7"],
    clip=1.5).
    """
    if isinstance(change, WhatIfChange):
        return change
    if change is not None:
        return parse(change)
    for name in parts:
        if name not in WhatIfChange.__dataclass_fields__:
            raise ConfigError(unknown("change", name, [n for n in WhatIfChange.__dataclass_fields__ if n != "text"]))
    return WhatIfChange(**parts)


def _parse_part(part: str, parts: dict[str, Any]) -> None:
    word, _, rest = part.partition(" ")
    rate = RATE.fullmatch(part.lower())
    names = [name for name in re.split(r"[,\s]+", rest) if name]
    if rate is not None:
        factor = _number(rate[3], part)
        key = "server_rate" if rate[1].startswith("server") else "client_rate"
        _positive(part, factor)
        parts[key] = parts.get(key, 1.0) * (1 / factor if rate[2] in "/÷" else factor)
    elif part.lower() in ("no fault", "no faults", "without fault", "without faults"):
        parts["no_faults"] = True
    elif word in ("drop", "without") and names:
        parts["drop"] = (*parts["drop"], *(name for name in names if name not in parts["drop"]))
    elif word == "clip" and len(names) == 1:
        parts["clip"] = _number(names[0], part)
    elif word == "weight" and len(names) == 2:
        parts["weights"][names[0]] = _number(names[1].lstrip("*x×"), part)
    elif word == "aggregator" and names:
        parts["aggregator"] = _aggregator(names)
    elif part.lower() != "nothing":
        raise ConfigError(f"«{part}» is no change that can be made here. Examples: {', '.join(EXAMPLES)}.")


def _aggregator(words: Sequence[str]) -> Any:
    pairs = [word.partition("=") for word in words[1:]]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError(f"Settings of an aggregator are written name=value; got '{' '.join(words)}'.")
    table = {name: toml.parse_value(value) for name, _, value in pairs}
    return toml.decode_kind("aggregator", {"kind": words[0], **table}, kinds_of(AGGREGATORS))


def _rule_text(rule: Any) -> str:
    kind = kind_of(type(rule).__name__)
    if not isinstance(rule, msgspec.Struct):
        return kind
    default = {f.name: f.default for f in msgspec.structs.fields(rule)}
    other = {name: value for name, value in msgspec.structs.asdict(rule).items() if value != default[name]}
    return " ".join([kind, *(f"{name}={value}" for name, value in other.items())])


def _number(text: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"«{part}» needs a number; got '{text}'. Examples: {', '.join(EXAMPLES)}.") from None


def _positive(what: str, value: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"The change «{what}» needs a number that is finite and above 0; got {value!r}.")


# -- what was in force at the time ------------------------------------------------------------------------------------


def recorded_actions(tape: TapeReader, first: int, round_index: int) -> list[Action]:
    """Return a round's recorded corrections for a replay that begins at `first`, without restores that happened
    before it.
    """
    if round_index not in tape.rounds:
        return []
    entry = tape.entry(round_index)
    gone_back = _restored_before(tape, first) if entry.goes_back else set()
    actions = []
    for action in entry.actions:
        arguments = dict(action["arguments"])
        if _action_key(action) in gone_back:
            arguments.pop("restore", None)
        actions.append(action_of({**action, "arguments": arguments}))
    return actions


def check_restores(tape: TapeReader, first: int, last: int) -> bool:
    """Return whether the rounds restore an earlier state somewhere. Raises ConfigError where that state lies before
    `first`.
    """
    goes_back = False
    for round_index in [r for r in tape.rounds if first <= r <= last]:
        for action in recorded_actions(tape, first, round_index):
            target = action.arguments.get("restore")
            if target is not None:
                goes_back = True
                if int(target) + 1 < first:
                    raise ConfigError(
                        f"In round {round_index} the run went back to the state of round {target}, before round "
                        f"{first}: begin at round {int(target) + 1} or earlier."
                    )
    return goes_back


def _restored_before(tape: TapeReader, first: int) -> set[str]:
    actions = [action for r in tape.rounds if r < first for action in tape.entry(r).actions]
    return {_action_key(action) for action in actions if "restore" in action["arguments"]}


def _action_key(action: Mapping[str, Any]) -> str:
    return str(action["arguments"].get("id", action["at"]))
