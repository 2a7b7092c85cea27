# SPDX-License-Identifier: Apache-2.0
"""Writes the catalogue of metrics as a page: docs/metrics.md."""

from __future__ import annotations

from fedvitals.catalog import LEVELS, MEASURES, PEERS
from fedvitals.stats import DERIVED, FAMILIES

PRIVACY = """
Set by `Monitor(privacy=)`: 3 by default in a lab or a plain loop, 2 in a deployment. It stands in the run's config, and `fedvitals show` prints it.

- Level 1 acts where there is someone to sum: a round or an edge with at least `Monitor(cohort=10)` clients behind every layer of the sum; elsewhere it is 0. Smallest and largest values are left out, since each is one client's own, and a sum is held back if others would give away a smaller one by subtraction.
- A client's words (log lines, messages of exceptions, attributes of `timed`) need level 3. Below, an error leaves with its class, a warning with its logger's name, and nothing else. `Monitor(tracebacks=)` is off by default in a deployment, at any level.
- What you log inside a client needs level 2; what you log outside any client is the server's own. On a thread without a scope, while clients train in the same process, it counts as a client's.
- `update.*`, the families `update` and sketches need their level to leave a client. A server computes them itself from the updates that it holds: that is not telemetry, and passes at every level.
- Run, layer names and shapes, names of nodes, loggers and `timed` blocks are told at every level: do not put secrets there.
"""  # noqa: E501 - a paragraph of Markdown is one line


def markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `src/fedvitals/catalog.py` by `scripts/docs`; do not edit.",
        "",
        "A metric whose *needs* are not met is absent; `fedvitals show RUN` says which and why.",
        "",
        "| name | unit | meaning | formula | needs | level |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for m in MEASURES:
        formula = f"`{m.formula}`" if m.formula else ""
        lines.append(f"| `{m.name}` | {m.unit} | {m.meaning} | {formula} | {m.needs} | {m.level} |")
    lines += [
        "",
        "## Families of layer statistics",
        "",
        "Packed matrices, one row a layer; the columns add up over steps, clients and edges where `merges` says so.",
        "",
        "| family | rows | columns | merges | level |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, family in FAMILIES.items():
        columns = (
            ", ".join(family.columns)
            if len(family.columns) < 20
            else (f"{len(family.columns)} bins: sign × binary exponent, `{family.columns[0]}` … `{family.columns[-1]}`")
        )
        lines.append(f"| `{name}` | {family.rows} | {columns} | {'yes' if family.merge else 'no'} | {family.level} |")
    lines += [
        "",
        f"From the nine sums derive, over the finite values: {', '.join(DERIVED)}.",
        "",
        "`update.peers`: how a client's update d_i stands among its round's; NaN where there is nothing to compare:",
        "",
        *(f"- {column}: {meaning}." for column, meaning in PEERS.items()),
        "",
        "## Privacy",
        "",
        "| level | may leave a client |",
        "| --- | --- |",
    ]
    lines += [f"| {level} | {text} |" for level, text in enumerate(LEVELS)]
    return "\n".join([*lines, "", PRIVACY.strip(), ""])
