# SPDX-License-Identifier: Apache-2.0
"""Writes tables as Parquet, Arrow (Feather) or CSV files, batch by batch; a file appears only when it is complete."""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError, unknown

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # the beginnings of a text that a spreadsheet would evaluate
FORMS = {"parquet": ".parquet", "arrow": ".feather", "csv": ".csv"}
Rows = Sequence[Sequence[Any]]


def check_form(form: str) -> None:
    """Raise an error that says what to install if this format cannot be written here."""
    if form not in FORMS:
        raise ConfigError(unknown("form of table", form, FORMS))
    if form != "csv":
        try:
            importlib.import_module("pyarrow")
        except ImportError as error:
            raise MissingExtraError("pyarrow", "parquet", f"A table as {form}") from error


def write_table(folder: Path, name: str, columns: Mapping[str, str], batches: Iterable[Rows], form: str) -> Path:
    """Write a table to a file. `columns` maps each name to «integer», «real», «text» or «blob»; None becomes null."""
    check_form(form)
    path = folder / f"{name}{FORMS[form]}"
    with whole(path) as unfinished, (_csv if form == "csv" else _arrow)(unfinished, columns, form) as write:
        for rows in batches:
            if rows:
                write(rows)
    return path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is moved to `path` when the block ends well, and removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _csv(path: Path, columns: Mapping[str, str], _form: str) -> Iterator[Any]:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)

        def write(rows: Rows) -> None:
            writer.writerows([_cell(value) for value in row] for row in rows)

        yield write


def _cell(value: Any) -> Any:
    """Return the value for a spreadsheet, where a client's text must not be a formula or move a terminal's cursor."""
    if isinstance(value, bytes):
        return value.hex()
    if not isinstance(value, str):
        return value
    plain = "".join("?" if unicodedata.category(c) == "Cc" and c not in "\t\n" else c for c in value)
    return f"'{plain}" if value.startswith(FORMULA) else plain


@contextlib.contextmanager
def _arrow(path: Path, columns: Mapping[str, str], form: str) -> Iterator[Any]:
    arrow: Any = importlib.import_module("pyarrow")
    types = {"integer": arrow.int64(), "real": arrow.float64(), "text": arrow.string(), "blob": arrow.binary()}
    schema = arrow.schema([(name, types[kind]) for name, kind in columns.items()])
    if form == "parquet":
        make: Any = importlib.import_module("pyarrow.parquet").ParquetWriter(path, schema, compression="zstd")
    else:
        options = arrow.ipc.IpcWriteOptions(compression="zstd")
        make = arrow.ipc.new_file(str(path), schema, options=options)
    with make as writer:

        def write(rows: Rows) -> None:
            arrays = [
                arrow.array(column, type=field.type)
                for column, field in zip(zip(*rows, strict=True), schema, strict=True)
            ]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))

        yield write
