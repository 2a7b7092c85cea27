# SPDX-License-Identifier: Apache-2.0
"""Defines the view `layer_statistics` in PostgreSQL, where blobs are unpacked by SQL functions."""

from __future__ import annotations

from fedvitals.stats import FAMILIES, STATISTICS
from fedvitals.store.packing import NONE

# Each takes a blob and the index of a number in it, little endian.
FUNCTIONS: tuple[str, ...] = (
    """CREATE OR REPLACE FUNCTION int4_at(b BYTEA, o INTEGER) RETURNS INTEGER LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  RETURN get_byte(b, o) | (get_byte(b, o + 1) << 8) | (get_byte(b, o + 2) << 16) | (get_byte(b, o + 3) << 24);
END $$""",
    """CREATE OR REPLACE FUNCTION int8_at(b BYTEA, o INTEGER) RETURNS BIGINT LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  n BIGINT := 0;
BEGIN
  FOR i IN 0..7 LOOP
    n := n | (get_byte(b, o + i)::BIGINT << (8 * i));
  END LOOP;
  RETURN n;
END $$""",
    """CREATE OR REPLACE FUNCTION float4_at(b BYTEA, o INTEGER) RETURNS DOUBLE PRECISION
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  high INTEGER := get_byte(b, o + 3);
  low INTEGER := get_byte(b, o + 2);
  fraction INTEGER := get_byte(b, o) | (get_byte(b, o + 1) << 8) | ((low & 127) << 16);
  exponent INTEGER := ((high & 127) << 1) | (low >> 7);
  n DOUBLE PRECISION;
BEGIN
  IF exponent = 255 THEN
    n := CASE WHEN fraction = 0 THEN 'Infinity'::DOUBLE PRECISION END;
  ELSIF exponent = 0 THEN
    n := fraction * power(2::DOUBLE PRECISION, -149);
  ELSE
    n := (8388608 + fraction) * power(2::DOUBLE PRECISION, exponent - 150);
  END IF;
  RETURN CASE WHEN high > 127 THEN -n ELSE n END;
END $$""",
    """CREATE OR REPLACE FUNCTION float8_at(b BYTEA, o INTEGER) RETURNS DOUBLE PRECISION
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  high INTEGER := get_byte(b, o + 7);
  low INTEGER := get_byte(b, o + 6);
  exponent INTEGER := ((high & 127) << 4) | (low >> 4);
  fraction BIGINT := low & 15;
  n DOUBLE PRECISION;
BEGIN
  FOR i IN REVERSE 5..0 LOOP
    fraction := (fraction << 8) | get_byte(b, o + i);
  END LOOP;
  IF exponent = 2047 THEN
    n := CASE WHEN fraction = 0 THEN 'Infinity'::DOUBLE PRECISION END;
  ELSIF exponent = 0 THEN
    n := fraction * power(2::DOUBLE PRECISION, -1074);
  ELSE
    n := (4503599627370496 + fraction) * power(2::DOUBLE PRECISION, exponent - 1075);
  END IF;
  RETURN CASE WHEN high > 127 THEN -n ELSE n END;
END $$""",
)

# From the packed columns (`stats.pack`: mean and spread instead of sums) to the statistics, as in `stats.derive`.
_DERIVED = {
    "count": "n.count",
    "mean": "CASE WHEN n.finite > 0 THEN n.mean END",
    "std": "CASE WHEN n.finite > 0 THEN n.std END",
    "l2": "sqrt((n.mean * n.mean + n.std * n.std) * n.finite)",
    "min": "n.min",
    "max": "n.max",
    "absmax": "CASE WHEN n.finite > 0 THEN greatest(abs(n.min), abs(n.max)) END",
    "mean_magnitude": "CASE WHEN n.finite > 0 THEN n.magnitude END",
    "sparsity": "CASE WHEN n.count > 0 THEN n.zeros / n.count END",
    "zeros": "n.zeros",
    "nans": "n.nans",
    "infs": "n.infs",
}
_PACKED = ("count", "mean", "std", "magnitude", "min", "max", "zeros", "nans", "infs")


def view(statistics: tuple[str, ...]) -> str:
    """Return the view with these statistics as columns."""
    families = ", ".join(f"'{name}'" for name, family in FAMILIES.items() if family.columns is STATISTICS)
    layer = "(CASE WHEN m.layer < 0 THEN l.position ELSE 0 END)"
    place = f"4 * ((9 * {layer} + {{}}) * b.entries + e.i)::INTEGER"
    numbers = ", ".join(f"float4_at(m.numbers, {place.format(i)}) AS {name}" for i, name in enumerate(_PACKED))
    values = ", ".join(f"{_DERIVED[name]} AS {name}" for name in statistics)
    # The coordinates are rounds, then times, then nodes; the details are steps, ..., with groups fourth.
    return f"""CREATE VIEW layer_statistics AS
SELECT run_symbol.text AS run, NULLIF(n.round, {NONE}) AS round, node_symbol.text AS node,
  NULLIF(n.step, {NONE}) AS step, group_symbol.text AS "group", n.at AS at,
  family_symbol.text AS family, layer_symbol.text AS layer, {values}
FROM (
  SELECT s.*, s.count - s.nans - s.infs AS finite FROM (
    SELECT b.run, b.family, l.name AS layer,
      int8_at(b.coordinates, (8 * e.i)::INTEGER) AS round,
      float8_at(b.coordinates, (8 * (b.entries + e.i))::INTEGER) AS at,
      int4_at(b.coordinates, (16 * b.entries + 4 * e.i)::INTEGER) AS node,
      int8_at(b.details, (8 * e.i)::INTEGER) AS step,
      int4_at(b.details, (20 * b.entries + 4 * e.i)::INTEGER) AS "group",
      {numbers}
    FROM layer_block AS b
    JOIN layer AS l ON l.layer_table = b.layer_table AND l.position < b.layers
    JOIN layer_matrix AS m ON m.block = b.arrival AND m.layer IN (-1, l.position)
    CROSS JOIN LATERAL generate_series(0, b.entries - 1) AS e(i)
    WHERE b.family IN (SELECT id FROM symbol WHERE text IN ({families}))
  ) AS s
) AS n
JOIN symbol AS run_symbol ON run_symbol.id = n.run
JOIN symbol AS family_symbol ON family_symbol.id = n.family
JOIN symbol AS layer_symbol ON layer_symbol.id = n.layer
LEFT JOIN symbol AS node_symbol ON node_symbol.id = n.node
LEFT JOIN symbol AS group_symbol ON group_symbol.id = n."group\""""  # noqa: S608 - our own words only
