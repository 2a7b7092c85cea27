# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ that are generated from code, metrics.md, schema.md and issues.md, and the example in hosts.md.

`scripts/docs` writes them, and `scripts/docs --check` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedvitals.catalog import LEVELS, MEASURES
from fedvitals.diagnosis.abstentions import ACCEPTED, NEWEST, NOT_JUDGED
from fedvitals.diagnosis.issues.table import FAMILIES as ISSUE_FAMILIES
from fedvitals.diagnosis.issues.table import ISSUES, Issue, measured_rates
from fedvitals.stats import (
    ADAPTERS,
    CLASS_STATISTICS,
    DERIVED,
    FAMILIES,
    FEWEST_IN_BAND,
    LENGTH_ROWS,
    PEERS,
    TOKEN_ROWS,
    group_names,
)
from fedvitals.store.schema import LAYER_STATISTICS, TABLES, VERSION

PRIVACY = """
Set by `Monitor(privacy=)`: 3 by default in a lab or a plain loop, 2 in a deployment. It is stored in the run's config, and `fedvitals show` prints it.

- Level 1 acts where there is someone to sum: a round or an edge with at least `Monitor(cohort=10)` clients behind every layer of the sum; elsewhere it is 0. Smallest and largest values are left out, since each is one client's own, and a sum is held back if others would give away a smaller one by subtraction.
- A client's words (log lines, messages of exceptions, attributes of `timed`) need level 3. Below, an error leaves with its class, a warning with its logger's name, and nothing else. `Monitor(tracebacks=)` is off by default in a deployment, at any level.
- What you log inside a client needs level 2; what you log outside any client is the server's own. On a thread without a scope, while clients train in the same process, it counts as a client's.
- `update.*`, the families `update` and sketches need their level to leave a client. A server computes them itself from the updates that it holds: that is not telemetry, and passes at every level.
- Run, layer names and shapes, names of nodes, loggers and `timed` blocks leave a client at every level: do not put secrets there.
"""  # noqa: E501 - a paragraph of Markdown is one line


CLASSES = (
    "`training.classes`: a row for each class (a column of the outputs; at most 100), over a client's first pass over "
    "its samples: samples of that label, the sum of their losses, of the squares of these, right guesses, and how "
    "often the class was guessed. From these derive: {statistics}."
)
TEXTS = (
    "`training.tokens` and `training.lengths`: the same for a language model, whose outputs are over the tokens of its "
    "own vocabulary. `samples` are targets: tokens that the training predicts; ignored ones, such as padding, do not "
    "count. A row of the first is a band of the vocabulary's numbers: {tokens}. Most tokenisers number tokens by how "
    "common they are, so that the first bands are of common tokens. A row of the second holds the targets of texts "
    "that have so many of them: {lengths}; `texts` is their number. A row of a batch is a text. The bands are the same "
    "for all clients. Bands of fewer than {fewest} targets or texts are left out. Of outputs of more than 1,048,576 "
    "numbers, evenly spread rows are looked at, and `samples` are these."
)


def metrics_page() -> str:
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
        "Packed matrices, one row per layer; the columns add up over steps, clients and edges where `merges` says so.",
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
        DIRECTIONS_PART,
        "",
        *(f"- {column}: {meaning}." for column, meaning in ADAPTERS.items()),
        "",
        CLASSES.format(statistics=", ".join(CLASS_STATISTICS)),
        "",
        TEXTS.format(
            tokens="; ".join(group_names(TOKEN_ROWS, 0)),
            lengths="; ".join(group_names(LENGTH_ROWS, 0)),
            fewest=FEWEST_IN_BAND,
        ),
        "",
        "## Privacy",
        "",
        "| level | may leave a client |",
        "| --- | --- |",
    ]
    lines += [f"| {level} | {text} |" for level, text in enumerate(LEVELS)]
    return "\n".join([*lines, "", PRIVACY.strip(), ""])


DIRECTIONS_PART = (
    "`update.adapters`: each low-rank adapter, of the server after the round; of a client its own part. "
    "`update.directions`: of the server, the shares of ‖P‖² of the first singular directions; of a client "
    "`w_i u_kᵀ M_i v_k / σ_k`, its part in each of them."
)
_SCHEMA_HEAD = """# The store's schema

Generated from `src/fedvitals/store/schema.py` by `scripts/docs`; do not edit.

A store is one SQLite file, or the schema «fedvitals» of a PostgreSQL database, with the same tables and views.
`fedvitals query SQL` reads it, and so does any client of that database, even during a training. Names are kept once, in
`symbol`; the other tables hold their numbers. **People read the views**, which show the names:

```sh
fedvitals query "SELECT node, value FROM metrics WHERE run = '...' AND name = 'loss' AND round = 7"
```

- NaN is stored as NULL (SQLite knows no NaN), infinity as it is. JSON has neither: there they are the texts "NaN",
  "Infinity" and "-Infinity".
- `layer_statistics` unpacks blobs. In SQLite it does so through a function that fedvitals registers: use it in
  `fedvitals query`, or after `fedvitals.store.open_reader`; a plain `sqlite3` shell reads everything but this one view.
- Behind the last page, the file has a checksum of each page, which SQLite ignores; while it is written they are in
  `runs.db.sums`. Readers of fedvitals refuse a store whose pages differ, and `fedvitals doctor` says which.
- In PostgreSQL say `SET search_path TO fedvitals` first. A NUL inside a text is kept as U+FFFF and the digit 0.

## Views
"""


def schema_page() -> str:
    """The page docs/schema.md."""
    lines = [
        _SCHEMA_HEAD,
        f"Schema version {VERSION} (`PRAGMA user_version`).",
        "",
        "| view | columns |",
        "| --- | --- |",
    ]
    lines += [f"| `{t.view}` | {', '.join(column.name for column in t.columns)} |" for t in TABLES if t.view]
    statistics = ", ".join(LAYER_STATISTICS)
    lines.append(f"| `layer_statistics` | run, round, node, step, group, at, family, layer, {statistics} |")
    lines += ["", "## Tables"]
    for table in TABLES:
        lines += ["", f"### `{table.name}`", "", table.meaning]
        lines += [f"View with names: `{table.view}`."] if table.view else []
        lines += ["", "| column | type | meaning |", "| --- | --- | --- |"]
        for column in table.columns:
            kind = {"symbol": "number of a name", "key": "integer, primary key"}.get(column.type, column.type)
            lines.append(f"| `{column.name}` | {kind} | {column.meaning} |")
        if table.key:
            lines += ["", f"Key: {', '.join(table.key)}."]
        for index in (*table.indexes, *(columns for _, columns in table.later)):
            lines += ["", f"Index: {', '.join(index)}."]
    return "\n".join(lines) + "\n"


_ISSUES_ABOUT = """\
The issues that fedvitals can detect in a training run. A finding gives one of these codes, where and since when it
applies, how certain it is, and the numbers behind it; `fedvitals findings RUN` prints it with the causes, the remedies
and what would prove it wrong, as listed here. `fedvitals check RUN` examines a stored run again.

*False alarms* are cases raised per 100 healthy rounds of the fault bank's third held-out set. *Exact* issues are
equality tests: what they report has happened, without uncertainty.

*Severity* follows damage and certainty. Critical: the model is being lost (it contains NaN, its loss runs away, or a
client that is certainly faulty decides the average alone). Warning: something is wrong. Note: worth knowing, shown only
on request (`--notes`).

Each problem is one case. If several issues could explain what one client does over the same rounds, the case lists them
as alternatives with probabilities; consequences of a lost model are listed below the case of the client that caused it.
A case is *still there* if it was seen when its client last took part.

## What an all-clear says

«No findings» comes with what was examined: clients, rounds and client-rounds. A client-round is judged if the client's
update was seen as it was trained, and was compared with those of enough peers. Otherwise it counts in
`diagnosis.not_judged`, with one of these reasons:

{reasons}

One model that trains alone (`fv.watch`) has nobody to be compared with, and is judged by its own measurements.

A run is *not fully examined*, and no command, page or report calls it healthy, if more than {accepted} of its
client-rounds or all of the newest {newest} rounds were not judged; if a detector, a sink or a step of the monitor
failed; if records were lost; or if a client trained outside of any round. `fedvitals findings` and `fedvitals check`
then exit with 1, as they do for warnings and criticals. Exact rules (NaN, failures, frozen layers) look at every
client-round regardless.

## All issues"""


def hosts_page() -> str:
    """The page docs/hosts.md, with its example as it is now."""
    page, example = (
        Path(path).read_text(encoding="utf-8") for path in ("docs/hosts.md", "examples/pipe_federation.py")
    )
    before, fence, _ = page.partition("```python\n# SPDX")
    return f"{before}{fence.removesuffix('# SPDX')}{example}```\n"


def issues_page() -> str:
    """The page docs/issues.md."""
    rates = measured_rates()
    reasons = "\n".join(f"- `{rule}`: {why}." for rule, why in NOT_JUDGED.items())
    about = _ISSUES_ABOUT.format(reasons=reasons, accepted=f"{100 * ACCEPTED:g} %", newest=NEWEST)
    lines = [
        "# Issues",
        "",
        "Generated from `src/fedvitals/diagnosis/issues/*.toml` by `scripts/docs`; do not edit.",
        "",
        about,
        "",
        "| code | what | family | severity | false alarms per 100 healthy rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for issue in ISSUES:
        link = f"[`{issue.code}`](#{issue.code.lower()})"
        lines.append(f"| {link} | {issue.title} | {issue.family} | {issue.severity} | {_rate(issue, rates)} |")
    for family in ISSUE_FAMILIES:
        lines += ["", f"## {family.capitalize()}"]
        for issue in ISSUES:
            if issue.family == family:
                lines += ["", *_section(issue)]
    return "\n".join([*lines, ""])


def _rate(issue: Issue, rates: Mapping[str, float]) -> str:
    rate = f"{rates[issue.code]:.2f}" if issue.code in rates else "not measured"
    return f"{rate} (exact)" if issue.exact else rate


def _section(issue: Issue) -> list[str]:
    lines = [f"### {issue.code}", "", f"**{issue.title}.** {issue.symptom}", "", "Likely causes, the likeliest first:"]
    lines += ["", *(f"{place}. {cause}" for place, cause in enumerate(issue.causes, 1))]
    lines += ["", "What to do:", "", *(f"{place}. {remedy}" for place, remedy in enumerate(issue.remedies, 1))]
    return [*lines, "", f"Proved wrong by: {issue.refutation}", "", f"Reference: {issue.reference}"]


PAGES = {
    "docs/metrics.md": metrics_page,
    "docs/schema.md": schema_page,
    "docs/issues.md": issues_page,
    "docs/hosts.md": hosts_page,
}


def stale() -> list[str]:
    """Return the paths of the pages that differ from what the code says."""
    root = Path(__file__).resolve().parents[2]
    files = {path: root / path for path in PAGES}
    return [
        path for path, file in files.items() if not file.exists() or file.read_text(encoding="utf-8") != PAGES[path]()
    ]
