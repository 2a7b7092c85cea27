# SPDX-License-Identifier: Apache-2.0
"""Turns the tables of `schema` into SQL statements."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.store import unpacking
from fedvitals.store.dialect import Dialect
from fedvitals.store.schema import LAYER_STATISTICS, MIGRATIONS, TABLES, VERSION, Column, Table


def quoted(name: str) -> str:
    """Return the column's name, in quotes where it is a reserved word of SQL."""
    return f'"{name}"' if name in ("group", "values") else name


def _column(column: Column, dialect: Dialect) -> str:
    default = "" if column.default is None else f" DEFAULT {column.default}"
    return f"{quoted(column.name)} {dialect.types[column.type]}{'' if column.null else ' NOT NULL'}{default}"


def _create(table: Table, version: int, dialect: Dialect) -> str:
    lines = [_column(column, dialect) for column in table.columns if column.since <= version]
    if table.key:
        lines.append(f"PRIMARY KEY ({', '.join(table.key)})")
    return f"CREATE TABLE {table.name} (\n  " + ",\n  ".join(lines) + "\n)"


def _indexes(table: Table, dialect: Dialect, wanted: Sequence[tuple[str, ...]]) -> list[str]:
    plain = "CREATE INDEX {name} ON {table} ({column})"
    template = dialect.unique if table.name == "symbol" else plain
    return [
        template.format(
            name=f"{table.name}_by_{'_'.join(columns)}", table=table.name, column=", ".join(map(quoted, columns))
        )
        for columns in wanted
    ]


def migration(version: int, dialect: Dialect) -> list[str]:
    """Return the statements that upgrade the schema from the previous version to this one, without the views."""
    statements: list[str] = []
    for table in TABLES:
        if table.since == version:
            statements += [_create(table, version, dialect), *_indexes(table, dialect, table.indexes)]
        elif table.since < version:
            added = [column for column in table.columns if column.since == version]
            statements += [f"ALTER TABLE {table.name} ADD COLUMN {_column(column, dialect)}" for column in added]
            statements += _indexes(table, dialect, [columns for since, columns in table.later if since == version])
    return [*statements, *MIGRATIONS.get(version, ())]


def _readable(table: Table) -> str:
    """Return a view with names instead of numbers.

    Joins rather than subqueries, so that a condition on a name can use the index on the number.
    """
    columns, joins = [], []
    for column in table.columns:
        name = quoted(column.name)
        if column.type == "symbol":
            columns.append(f"{column.name}_symbol.text AS {name}")
            kind = "LEFT JOIN" if column.null else "JOIN"
            joins.append(f"{kind} symbol AS {column.name}_symbol ON {column.name}_symbol.id = t.{name}")
        else:
            columns.append(f"t.{name}")
    lines = [f"SELECT {', '.join(columns)}", f"FROM {table.name} AS t", *joins]
    return f"CREATE VIEW {table.view} AS\n" + "\n".join(lines)


def _layer_statistics() -> str:
    """Return the view of packed statistics as rows; our connections all register `fedvitals_layer` (see `reader`)."""
    coordinates = ("round", "node", "step", '"group"', "at")
    place = [
        "json_extract(e.value, '$[0]') AS round",
        "node_symbol.text AS node",
        "json_extract(e.value, '$[2]') AS step",
        'group_symbol.text AS "group"',
        "json_extract(e.value, '$[4]') AS at",
    ]
    values = [
        f"json_extract(e.value, '$[{i}]') AS {name}" for i, name in enumerate(LAYER_STATISTICS, start=len(coordinates))
    ]
    return (
        "CREATE VIEW layer_statistics AS\n"
        f"SELECT run_symbol.text AS run, {', '.join(place)},\n"
        "  family_symbol.text AS family, layer_symbol.text AS layer,\n"
        f"  {', '.join(values)}\n"
        "FROM layer_block AS b\n"
        "JOIN symbol AS run_symbol ON run_symbol.id = b.run\n"
        "JOIN symbol AS family_symbol ON family_symbol.id = b.family\n"
        "JOIN layer AS l ON l.layer_table = b.layer_table\n"
        "JOIN symbol AS layer_symbol ON layer_symbol.id = l.name\n"
        "JOIN layer_matrix AS m ON m.block = b.arrival AND m.layer IN (-1, l.position)\n"
        "JOIN json_each(fedvitals_layer(family_symbol.text, l.position, m.layer, b.layers, b.entries, "
        "b.coordinates, b.details, m.numbers)) AS e\n"
        "LEFT JOIN symbol AS node_symbol ON node_symbol.id = json_extract(e.value, '$[1]')\n"
        "LEFT JOIN symbol AS group_symbol ON group_symbol.id = json_extract(e.value, '$[3]')"
    )


def views(dialect: Dialect) -> dict[str, str]:
    """Return the views by name. They hold no data, so every change of version creates them again."""
    statements = {table.view: _readable(table) for table in TABLES if table.view}
    if dialect.name == "sqlite":
        statements["layer_statistics"] = _layer_statistics()
    elif dialect.name == "postgresql":
        statements["layer_statistics"] = unpacking.view(LAYER_STATISTICS)
    return statements


def upgrade(version: int, dialect: Dialect) -> list[str]:
    """Return all statements that upgrade from a version (0: an empty database) to the current one."""
    created = views(dialect)
    statements = [f"DROP VIEW IF EXISTS {name}" for name in created]
    for step in range(version + 1, VERSION + 1):
        statements += migration(step, dialect)
    functions = unpacking.FUNCTIONS if dialect.name == "postgresql" else ()
    return [*statements, *functions, *created.values()]
