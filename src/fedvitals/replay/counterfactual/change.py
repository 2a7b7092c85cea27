# SPDX-License-Identifier: Apache-2.0
"""What is changed in a «what if», as a person says it: «drop c7; clip 1.5», «learning_rate / 10», «no faults»."""

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
class Change:
    """Nothing, as made. `client_rate` and `server_rate` are factors; `clip` is the longest update that is let in."""

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
        object.__setattr__(self, "text", self.text or self._said())

    @property
    def nothing(self) -> bool:
        return self == Change(text=self.text)

    def check(self, experiment: Experiment, groups: Sequence[str] = ()) -> None:
        """Whatever is named must be there."""
        for node in (*self.drop, *self.weights):
            if node not in (*experiment.nodes, *groups):
                raise ConfigError(unknown("client", node, (*experiment.nodes, *groups)))
        if not set(experiment.nodes) - set(self.drop):
            raise ConfigError("A federation without any client has nothing to aggregate: leave somebody in.")

    def experiment(self, experiment: Experiment) -> Experiment:
        """The experiment with what can only be changed there: its rule, and its faults."""
        fields: dict[str, Any] = {}
        if self.aggregator is not None:
            fields["aggregator"] = self.aggregator
        if self.no_faults:
            fields["faults"] = ()
        return msgspec.structs.replace(experiment, **fields) if fields else experiment

    def actions(self, number: int) -> list[Action]:
        """The rest, as the lab's own corrections in force in a round."""
        found: list[tuple[str, str | None, dict[str, Any]]] = [("quarantine", node, {}) for node in self.drop]
        found += [("reweight", node, {"factor": float(factor)}) for node, factor in self.weights.items()]
        if self.clip is not None:
            found.append(("clip_updates", None, {"norm": float(self.clip)}))
        for kind in ("client_rate", "server_rate"):
            if (factor := getattr(self, kind)) != 1:
                found.append((kind, None, {"factor": float(factor)}))
        return [Action(Where("", number), 0.0, OURS, kind, target, told) for kind, target, told in found]

    def _said(self) -> str:
        said = [f"drop {', '.join(self.drop)}"] if self.drop else []
        said += [f"weight {node} {factor:g}" for node, factor in self.weights.items()]
        said += [f"clip {self.clip:g}"] if self.clip is not None else []
        said += [f"learning_rate * {self.client_rate:g}"] if self.client_rate != 1 else []
        said += [f"server_rate * {self.server_rate:g}"] if self.server_rate != 1 else []
        said += [f"aggregator {_named(self.aggregator)}"] if self.aggregator is not None else []
        said += ["no faults"] if self.no_faults else []
        return "; ".join(said) or "nothing"


OURS = "what if"  # in place of a finding: an action of a change


def parse(text: str) -> Change:
    """A change as it is said; several are set apart by «;» or «and»."""
    parts: dict[str, Any] = {"weights": {}, "drop": ()}
    for said in re.split(r";|\band\b", text):
        if said.strip():
            _part(said.strip(), parts)
    return Change(**parts)


def change_of(said: str | Change | None = None, **parts: Any) -> Change:
    """From a sentence, from a change, or from its parts: change_of("drop c7"), change_of(drop=["c7"], clip=1.5)."""
    if isinstance(said, Change):
        return said
    if said is not None:
        return parse(said)
    for name in parts:
        if name not in Change.__dataclass_fields__:
            raise ConfigError(unknown("change", name, [n for n in Change.__dataclass_fields__ if n != "text"]))
    return Change(**parts)


def _part(said: str, parts: dict[str, Any]) -> None:
    word, _, rest = said.partition(" ")
    rate = RATE.fullmatch(said.lower())
    names = [name for name in re.split(r"[,\s]+", rest) if name]
    if rate is not None:
        factor = _number(rate[3], said)
        key = "server_rate" if rate[1].startswith("server") else "client_rate"
        _positive(said, factor)
        parts[key] = parts.get(key, 1.0) * (1 / factor if rate[2] in "/÷" else factor)
    elif said.lower() in ("no fault", "no faults", "without fault", "without faults"):
        parts["no_faults"] = True
    elif word in ("drop", "without") and names:
        parts["drop"] = (*parts["drop"], *(name for name in names if name not in parts["drop"]))
    elif word == "clip" and len(names) == 1:
        parts["clip"] = _number(names[0], said)
    elif word == "weight" and len(names) == 2:
        parts["weights"][names[0]] = _number(names[1].lstrip("*x×"), said)
    elif word == "aggregator" and names:
        parts["aggregator"] = _aggregator(names)
    elif said.lower() != "nothing":
        raise ConfigError(f"«{said}» is no change that can be made here. Examples: {', '.join(EXAMPLES)}.")


def _aggregator(words: Sequence[str]) -> Any:
    pairs = [word.partition("=") for word in words[1:]]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError(f"Settings of an aggregator are written name=value; got '{' '.join(words)}'.")
    table = {name: toml.parse_value(value) for name, _, value in pairs}
    return toml.decode_kind("aggregator", {"kind": words[0], **table}, kinds_of(AGGREGATORS))


def _named(rule: Any) -> str:
    kind = kind_of(type(rule).__name__)
    if not isinstance(rule, msgspec.Struct):
        return kind
    default = {f.name: f.default for f in msgspec.structs.fields(rule)}
    other = {name: value for name, value in msgspec.structs.asdict(rule).items() if value != default[name]}
    return " ".join([kind, *(f"{name}={value}" for name, value in other.items())])


def _number(text: str, said: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"«{said}» needs a number; got '{text}'. Examples: {', '.join(EXAMPLES)}.") from None


def _positive(what: str, value: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"The change «{what}» needs a number that is finite and above 0; got {value!r}.")


# -- what was in force at the time ------------------------------------------------------------------------------------


def recorded_actions(tape: TapeReader, first: int, number: int) -> list[Action]:
    """The corrections of a round, for one that begins at `first`: what went back before that, has gone back."""
    if number not in tape.rounds:
        return []
    told = tape.entry(number).notes.get("actions", ())
    gone_back = _restored_before(tape, first) if any("restore" in one["arguments"] for one in told) else set()
    found = []
    for one in told:
        arguments = dict(one["arguments"])
        if _name(one) in gone_back:
            arguments.pop("restore", None)
        fields = {key: value for key, value in one.items() if key not in ("where", "arguments")}
        found.append(Action(Where(**one["where"]), arguments=arguments, **fields))
    return found


def check_restores(tape: TapeReader, first: int, last: int) -> bool:
    """Whether the stretch goes back to an earlier state somewhere; a ConfigError where that lies before it."""
    found = False
    for number in [r for r in tape.rounds if first <= r <= last]:
        for action in recorded_actions(tape, first, number):
            target = action.arguments.get("restore")
            if target is not None:
                found = True
                if int(target) + 1 < first:
                    raise ConfigError(
                        f"In round {number} the run went back to the state of round {target}, before round {first}: "
                        f"begin at round {int(target) + 1} or earlier."
                    )
    return found


def _restored_before(tape: TapeReader, first: int) -> set[str]:
    return {
        _name(one)
        for number in tape.rounds
        if number < first
        for one in tape.entry(number).notes.get("actions", ())
        if "restore" in one["arguments"]
    }


def _name(told: Mapping[str, Any]) -> str:
    return str(told["arguments"].get("id", told["at"]))
