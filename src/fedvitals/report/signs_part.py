# SPDX-License-Identifier: Apache-2.0
"""The report's sections on learning, layers and clients."""

from __future__ import annotations

import math

from fedvitals import plot
from fedvitals.report.markup import Block, Heading, Table, Text, literal
from fedvitals.report.pictures import Pictures
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import Card as HealthCard
from fedvitals.views.card import Sign
from fedvitals.views.clients import ClientRow, clients_page, roster
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.overview import overview
from fedvitals.views.units import number, seconds, size, whole_percent, with_unit

ROWS = 15  # of clients


def learning_part(reader: Reader, run: str, card: HealthCard, pictures: Pictures) -> list[Block]:
    """Return the section on accuracy and loss."""
    rows = tuple(
        (f"`{sign.name}`", _of(reader, run, sign), *(with_unit(value, sign.unit) for value in _trend(sign.values)))
        for sign in card.signs
    )
    blocks: list[Block] = [
        Heading(2, "Learning"),
        pictures.of(
            "learning",
            "accuracy and loss over the rounds, with the clients' spread",
            lambda: plot.learning((reader, run)),
            "Band: the clients, min–max and 5–95 %; points where fewer than three told. Marks on top are findings: "
            "· note, ▲ warning, ■ critical.",
        ),
    ]
    if rows:
        head = ("vital sign", "of", "first", "lowest", "highest", "last")
        blocks.append(Table("Vital signs", head, rows, numbers=frozenset({2, 3, 4, 5})))
    return blocks


def _of(reader: Reader, run: str, sign: Sign) -> str:
    """Whose values; of a median, of how many clients: one client's value is no middle of many."""
    matrix = metric_matrix(reader, run, sign.name) if sign.of == "median client" else None
    counts = [int(count) for count in (() if matrix is None else matrix.band().count) if count]
    if not counts:
        return sign.of
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    return f"{sign.of}, of {many} a round"


def _trend(values: object) -> tuple[float | None, ...]:
    known = list(values)  # type: ignore[call-overload]
    finite = [v for v in known if math.isfinite(v)]
    return (known[0], min(finite, default=None), max(finite, default=None), known[-1])


def layers_part(reader: Reader, run: str, pictures: Pictures) -> list[Block]:
    """Return the section on layers."""
    blocks: list[Block] = [Heading(2, "Layers and gradients")]
    families = queries.layer_families(reader, run)
    if "gradient" in families:
        blocks.append(
            pictures.of(
                "layers",
                "root mean square of every layer's gradient, layers by rounds",
                lambda: plot.layers((reader, run)),
            )
        )
        blocks.append(
            pictures.of(
                "gradient-flow",
                "size of the gradient from the first layer to the last",
                lambda: plot.gradient_flow((reader, run)),
            )
        )
    else:
        blocks.append(Text("No statistics of single layers were kept: they need a model, and privacy level 3."))
    caption = (
        "`scale.gsc` reads the paper's formula as its figures number the layers; 0 is a level of its own. Compare "
        "runs, not one run with a constant."
    )
    words = "the gradient scale coefficient over the rounds, on a log axis"
    blocks.append(pictures.of("gsc", words, lambda: plot.gsc((reader, run)), caption))
    if "activation.health" in families:
        for statistic, what in (("dead_fraction", "dead"), ("saturated_fraction", "saturated")):
            blocks.append(
                pictures.of(
                    f"units-{what}",
                    f"share of {what} units, layers by rounds",
                    lambda statistic=statistic: plot.layers((reader, run), "activation.health", statistic),  # type: ignore[misc]
                )
            )
    return blocks


def clients_part(reader: Reader, run: str, pictures: Pictures) -> list[Block]:
    """Return the section on clients."""
    page = clients_page(roster(reader, run), limit=ROWS)
    sign = overview(reader, run).sign
    blocks: list[Block] = [Heading(2, "Clients")]
    if not page.total:
        return [*blocks, Text("No client was seen.")]
    health = ", ".join(f"{count} {name}" for name, count in page.health.items() if count)
    blocks.append(Text(f"{page.total} clients: {health}." if health else f"{page.total} clients."))
    if sign is not None:
        blocks.append(
            pictures.of(
                "clients",
                f"{literal(sign)} of the clients over the rounds, worst first",
                lambda: plot.clients((reader, run), sign),
                "Hatched: took no part, or was not measured. Black: not a number.",
            )
        )
    head = (
        "client",
        "open findings",
        "stands out by",
        "rounds",
        "loss",
        "update",
        "cosine",
        "time",
        "bytes",
        "failures",
    )
    rows = [_row(row) for row in page.rows]
    keep = [i for i in range(len(head)) if i < 4 or any(row[i] not in ("–", "0") for row in rows)]
    blocks.append(
        Table(
            f"Clients, worst first ({len(rows)} of {page.total})",
            tuple(head[i] for i in keep),
            tuple(tuple(row[i] for i in keep) for row in rows),
            numbers=frozenset(place for place, i in enumerate(keep) if i > 2),
        )
    )
    if page.groups:
        words = "who talks to whom in the newest round"
        blocks.append(pictures.of("topology", words, lambda: plot.topology((reader, run))))
    words = "directions of the newest round's updates in a plane: who behaves alike"
    blocks.append(pictures.of("update-map", words, lambda: plot.update_map((reader, run))))
    if page.total > 2:
        words = "cosines between the newest round's updates, clustered"
        blocks.append(pictures.of("similarity", words, lambda: plot.similarity((reader, run))))
    return blocks


def _row(row: ClientRow) -> tuple[str, ...]:
    cases = "; ".join(f"{literal(case.title)} {whole_percent(case.confidence)}" for case in row.cases)
    return (
        literal(row.name, 40) + (f" ({literal(row.label)})" if row.label else ""),
        cases or "–",
        "NaN or infinite values" if row.broken else literal(row.why, 60) or "–",
        f"{row.attended} of {row.sampled}" if row.sampled != row.attended else str(row.attended),
        number(row.loss),
        number(row.norm),
        number(row.cosine),
        seconds(row.seconds),
        size(row.bytes),
        str(row.failures),
    )
