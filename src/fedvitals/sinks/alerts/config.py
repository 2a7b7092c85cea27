# SPDX-License-Identifier: Apache-2.0
"""Reads `alerts.toml`: rules and channels. Secrets are written as `${NAME}` and taken from the environment.

[channels.team]
kind = "webhook"
url = "${SLACK_WEBHOOK}"

[[rules]]
when = "update.norm > 5 × own median for 3 rounds"
severity = "critical"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, unknown
from fedvitals.sinks.alerts.channels import Channel, Command, File
from fedvitals.sinks.alerts.email import Email
from fedvitals.sinks.alerts.rules import Rule, gap_of, rule
from fedvitals.sinks.alerts.webhook import Webhook

MOST_RULES, MOST_CHANNELS = 200, 20
_SECRET = re.compile(r"\$\{(\w*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")

Maker = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Channel]
"""From a channel's name, its settings with secrets filled in, and the settings as they are written."""


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    """The contents of an alerts file."""

    rules: tuple[Rule, ...]
    channels: tuple[Channel, ...]
    group: bool = True
    folder: Path | None = None
    names: tuple[str, ...] = ()  # of the channels, even if none was created


def load(path: str | os.PathLike[str], *, secrets: bool = True) -> AlertsConfig:
    """Read the rules and channels of a file. Without `secrets` (to check a stored run) no channel is created."""
    file = Path(path).expanduser()
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {file}. An example is examples/alerts.toml; docs/alerts.md describes the format."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    try:
        return _config_of(settings, secrets=secrets)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _config_of(settings: Mapping[str, Any], *, secrets: bool) -> AlertsConfig:
    _only(settings, ("rules", "channels", "group", "folder"), "an alerts file")
    group = _typed(settings, "group", bool, True)
    folder = _typed(settings, "folder", str, None)
    channels = _typed(settings, "channels", dict, {})
    rules = rules_of(_typed(settings, "rules", list, []))
    if not rules:
        raise ConfigError('It has no rule. Write [[rules]] and under it when = "accuracy < 0.8 for 5 rounds".')
    known_channels = [_channel(name, own, secrets=secrets) for name, own in channels.items()]
    check_channels(rules, list(channels))
    place = None if folder is None else Path(folder).expanduser()
    return AlertsConfig(
        rules, tuple(channel for channel in known_channels if channel is not None), group, place, tuple(channels)
    )


def rules_of(entries: Sequence[Any]) -> tuple[Rule, ...]:
    """Return rules from texts, tables {"when": ..., ...} and rules; names must be unique."""
    rules: list[Rule] = []
    for number, entry in enumerate(entries, 1):
        match entry:
            case Rule():
                rules.append(entry)
            case str():
                rules.append(rule(entry))
            case Mapping() if isinstance(entry.get("when"), str):
                settings = dict(entry)
                rules.append(rule(settings.pop("when"), **settings))
            case _:
                raise ConfigError(f'Rule {number} has no `when`. Write when = "accuracy < 0.8 for 5 rounds".')
    names = [known.name for known in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two rules are called '{name}'. Give each a `name` of its own.")
    if len(rules) > MOST_RULES:
        raise ConfigError(f"There are {len(rules)} rules, {MOST_RULES} are the most.")
    return tuple(rules)


def check_channels(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """Raise ConfigError if two channels share a name, or if a rule names a channel that does not exist."""
    if not names:
        raise ConfigError('There is no channel. Write [channels.log], kind = "file", path = "alerts.jsonl".')
    if len(names) > MOST_CHANNELS:
        raise ConfigError(f"There are {len(names)} channels, {MOST_CHANNELS} are the most.")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"A channel's name is up to 40 letters, digits, - and _, got '{name[:60]}'.")
        if names.count(name) > 1:
            raise ConfigError(f"Two channels are called '{name}'. Give each a `name` of its own.")
    for rule_ in rules:
        for name in rule_.channels:
            if name not in names:
                raise ConfigError(f"Rule '{rule_.name}': {unknown('channel', name, names)}")


def _channel(name: str, settings: Any, *, secrets: bool) -> Channel | None:
    if not isinstance(settings, dict):
        raise ConfigError(f"The channel '{name}' is a table. Write [channels.{name}] and under it kind = \"webhook\".")
    kind = str(settings.get("kind"))
    if kind not in KINDS:
        raise ConfigError(f"Channel '{name}': {unknown('kind of channel', kind, KINDS)}")
    make, known = KINDS[kind]
    _only(settings, ("kind", "timeout", "again", *known), f"the {kind} channel '{name}'")
    for wanted, (_, needed) in known.items():
        if needed and wanted not in settings:
            raise ConfigError(f"The {kind} channel '{name}' needs `{wanted}`.")
    for key, value in settings.items():
        if key in known and not isinstance(value, known[key][0]):
            raise ConfigError(
                f"`{key}` of the {kind} channel '{name}' is {known[key][0].__name__}, got {type(value).__name__}."
            )
    if not secrets:
        return None
    return make(name, {key: _filled(value) for key, value in settings.items()}, settings)


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings common to all channels: the time limit of an attempt, and whether to resend after doubt."""
    shared: dict[str, Any] = {}
    if "timeout" in settings:
        gap = gap_of(_typed(settings, "timeout", str, ""))
        if gap.seconds is None or not 0 < gap.seconds <= 300:
            raise ConfigError(f"A timeout is up to 300 s, written '10 s' or '1 min', got '{settings['timeout']}'.")
        shared["seconds"] = gap.seconds
    if "again" in settings:
        shared["again"] = _typed(settings, "again", bool, False)
    return shared


def _webhook(name: str, filled: Mapping[str, Any], written: Mapping[str, Any]) -> Channel:
    more = {key: filled[key] for key in ("headers", "ca") if key in filled}
    return Webhook(filled["url"], name, label=written["url"], **more, **_shared(filled))


def _email(name: str, filled: Mapping[str, Any], _: Mapping[str, Any]) -> Channel:
    more = {key: filled[key] for key in ("port", "security", "user", "password", "ca") if key in filled}
    return Email(filled["host"], filled["from"], tuple(filled["to"]), name, **more, **_shared(filled))


def _command(name: str, filled: Mapping[str, Any], written: Mapping[str, Any]) -> Channel:
    secrets = tuple(now for now, before in zip(filled["command"], written["command"], strict=True) if now != before)
    return Command(filled["command"], name, label=repr(written["command"]), secrets=secrets, **_shared(filled))


def _file(name: str, filled: Mapping[str, Any], _: Mapping[str, Any]) -> Channel:
    return File(filled["path"], name, **_shared(filled))


KINDS: Mapping[str, tuple[Maker, Mapping[str, tuple[type, bool]]]] = {
    "webhook": (_webhook, {"url": (str, True), "headers": (dict, False), "ca": (str, False)}),
    "email": (
        _email,
        {"host": (str, True), "from": (str, True), "to": (list, True), "port": (int, False)}
        | dict.fromkeys(("security", "user", "password", "ca"), (str, False)),
    ),
    "command": (_command, {"command": (list, True)}),
    "file": (_file, {"path": (str, True)}),
}
"""Each kind of channel: how it is made, and its settings with their type and whether they are needed."""


def _filled(value: Any) -> Any:
    """Return the setting with `${NAME}` replaced from the environment; the value appears in no error."""
    if isinstance(value, str):
        return _SECRET.sub(_from_environment, value)
    if isinstance(value, list):
        return [_filled(part) for part in value]
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items()}
    return value


def _from_environment(match: re.Match[str]) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise ConfigError(f"The environment variable '{match[1]}' is not set. Say: export {match[1] or 'NAME'}=...")
    return value.strip()


def _only(settings: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in settings:
        if name not in known:
            raise ConfigError(unknown(f"setting of {what}", name, known))


def _typed(settings: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = settings.get(name, default)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"`{name}` is {kind.__name__}, got {type(value).__name__}.")
    return value
