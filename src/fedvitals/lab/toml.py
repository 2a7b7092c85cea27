# SPDX-License-Identifier: Apache-2.0
"""Read and write experiments as TOML. Anything unknown, mistyped or impossible is refused, with the valid choices."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from fedvitals.errors import ConfigError, MissingExtraError, unknown


def parse(text: str) -> dict[str, Any]:
    """Return the table of a TOML text, or raise ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if "\n" not in text and text.endswith(".toml"):
            raise ConfigError(
                f"This is the name of a file, not its text: lab.read(Path({text!r}).read_text())."
            ) from error
        raise ConfigError(
            f"This is no TOML: {error}. An experiment looks like  rounds = 10  on lines of its own."
        ) from error


def set_key(table: dict[str, Any], name: str, value: Any) -> None:
    """Set one key, by its dotted name. A kind given as a plain name becomes a table first."""
    *path, last = name.split(".")
    here = table
    for part in path:
        inner = here.get(part, {})
        here[part] = inner = {"kind": inner} if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise ConfigError(f"'{name}' cannot be set: '{part}' is {inner!r}, which has no keys.")
        here = inner
    here[last] = value


def parse_value(text: str) -> Any:
    """Return the value of the right side of `--set name=text`: TOML where it is valid TOML, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def decode_kind(field: str, table: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """Return the description for a table with a `kind`."""
    if "kind" not in table:
        raise ConfigError(f"'{field}' needs a kind: {field} = {{kind = \"...\"}}. Known: {', '.join(sorted(kinds))}.")
    kind = str(table["kind"]).replace("-", "_")
    if kind not in kinds:
        raise ConfigError(unknown(f"kind of {field}", kind, kinds))
    return decode(kinds[kind], {**table, "kind": kind}, f"{field} «{kind}»")


def decode(cls: type, table: Mapping[str, Any], what: str) -> Any:
    """Return an object of the class from its table, with every key known and every value of its type."""
    known = [field.name for field in msgspec.structs.fields(cls)]
    for key in table:
        if key not in known and key != "kind":
            raise ConfigError(unknown(f"key of {what}", key, known))
    try:
        return msgspec.convert(dict(table), cls)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"The {what} cannot be read: {_in_words(str(error), cls)}") from error


def _in_words(message: str, cls: type) -> str:
    """Return msgspec's message as a sentence about the keys of a table."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`.*", message)
    if missing is not None:
        keys = ", ".join(field.name for field in msgspec.structs.fields(cls))
        return f"it needs a value for {missing[1]}. Its keys: {keys}."
    place = re.fullmatch(r"(.*) - at `\$\.(.+)`", message)
    return f"{message}." if place is None else f"{place[2]}: {place[1]}."


def check_types(value: Any, what: str) -> Any:
    """Return a description made in Python, with its types checked as if it came from TOML."""
    return decode(type(value), msgspec.to_builtins(value), what) if isinstance(value, msgspec.Struct) else value


def dumps(table: Mapping[str, Any]) -> str:
    """Return the TOML text of a table."""
    try:
        import tomli_w  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("tomli-w", "lab", "Writing an experiment as TOML") from error
    return tomli_w.dumps(table)


def write(experiment: Any) -> str:
    """Return the TOML of an experiment, without values that equal their defaults."""
    default = type(experiment)()
    table: dict[str, Any] = {}
    for field in msgspec.structs.fields(experiment):
        value = getattr(experiment, field.name)
        if value != getattr(default, field.name):
            table[field.name] = _plain(field.name, value)
    return dumps(table)


def _plain(field: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(field, entry) for entry in value]
    if isinstance(value, msgspec.Struct | str | int | float):
        return _table(value)
    raise ConfigError(
        f"The experiment's {field} is your own object ({type(value).__name__}), which TOML cannot hold. Keep such an "
        "experiment as Python, or use one of the kinds that ship."
    )


def _table(value: Any) -> Any:
    """Return the plain values of a description, without None, which TOML cannot express, and without later keys that
    have their defaults (see `Description.later`).
    """
    if isinstance(value, msgspec.Struct):
        config, later = value.__struct_config__, getattr(type(value), "later", ())
        table = {} if config.tag_field is None else {config.tag_field: config.tag}
        for field in msgspec.structs.fields(value):
            own = getattr(value, field.name)
            if own is not None and not (field.name in later and own == field.default):
                table[field.name] = _table(own)
        return table
    if isinstance(value, dict):
        return {key: _table(entry) for key, entry in value.items() if entry is not None}
    return [_table(entry) for entry in value] if isinstance(value, list | tuple) else msgspec.to_builtins(value)
