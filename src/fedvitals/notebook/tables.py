# SPDX-License-Identifier: Apache-2.0
"""Returns columns as a pandas DataFrame, an Arrow table, or a plain dictionary of lists."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError, unknown

AUTO = "auto"
PACKAGES = {"pandas": "pandas", "arrow": "pyarrow"}  # the form of a table → the package that it needs
FORMS = (AUTO, *PACKAGES, "columns")
# Types of columns by name; all others are real numbers.
TYPES = {
    **dict.fromkeys(("node", "name", "layer", "group", "label", "severity", "issue", "title", "message"), "text"),
    **dict.fromkeys(("follows_from", "id", "host", "state"), "text"),
    **dict.fromkeys(("round", "since", "last", "rounds", "clients", "findings"), "integer"),
    "still_there": "boolean",
}

Columns = Mapping[str, Sequence[Any]]


def as_table(columns: Columns, form: str) -> Any:
    """Return columns of equal length as «pandas», «arrow», «columns», or «auto».

    «auto» is a DataFrame if pandas is installed, else an Arrow table if pyarrow is, else «columns»: a dictionary of
    lists. Missing values are None, or NaN in a DataFrame's columns of real numbers. Raises ConfigError for another
    form, and an error that names the package if it is not installed.
    """
    if form not in FORMS:
        raise ConfigError(unknown("form of table", form, FORMS))
    if form == AUTO:
        form = next((known for known, package in PACKAGES.items() if importlib.util.find_spec(package)), "columns")
    if form == "columns":
        return {name: list(cells) for name, cells in columns.items()}
    return (_pandas if form == "pandas" else _arrow)(columns)


def _pandas(columns: Columns) -> Any:
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise ConfigError(
            "A DataFrame needs the package 'pandas', which is not installed. Install it with:  pip install pandas  "
            "or take as_='arrow' or as_='columns'."
        ) from error
    return pandas.DataFrame({name: pandas.Series(cells, dtype=_dtype(name, cells)) for name, cells in columns.items()})


def _dtype(name: str, cells: Sequence[Any]) -> str:
    """Return NumPy's type, or pandas' for columns of integers with missing values, for which NumPy has none."""
    kind = TYPES.get(name, "real")
    whole = "Int64" if None in cells else "int64"
    return {"text": "object", "integer": whole, "boolean": "bool", "real": "float64"}[kind]


def _arrow(columns: Columns) -> Any:
    try:
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "A table as arrow") from error
    types = {"text": arrow.string(), "integer": arrow.int64(), "boolean": arrow.bool_(), "real": arrow.float64()}
    return arrow.table(
        {name: arrow.array(cells, type=types[TYPES.get(name, "real")]) for name, cells in columns.items()}
    )
