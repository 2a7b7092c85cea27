# SPDX-License-Identifier: Apache-2.0
"""The sections of a report on one run: learning, layers, clients, costs, configuration, and how far to trust it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping

from fedvitals import plot
from fedvitals.analysis.stragglers import costly
from fedvitals.diagnosis.gaps import incomplete
from fedvitals.plot.round_stacks import draw_traffic
from fedvitals.plot.round_waterfall import draw_waterfall
from fedvitals.plural import counted
from fedvitals.report.markup import Block, Facts, Folded, Pictures, Points, Table, Text, literal
from fedvitals.report.settings import flat, readable
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import Card as HealthCard
from fedvitals.views.card import Sign, how_often
from fedvitals.views.clients import ClientRow, clients_page, roster
from fedvitals.views.comparison.runs import flattened
from fedvitals.views.labels import labels_of, named
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.overview import overview
from fedvitals.views.profile import Profile
from fedvitals.views.round import round_page
from fedvitals.views.status import status_of
from fedvitals.views.units import number, seconds, size, whole_percent, with_unit
from fedvitals.views.verdict import facts_of

ROWS = 15  # of clients


def learning_picture(reader: Reader, run: str, pictures: Pictures) -> Block:
    """Return accuracy and loss as a picture."""
    return pictures.of(
        "learning",
        "accuracy and loss over the rounds, with the clients' spread",
        lambda: plot.learning((reader, run)),
        "Band: the clients, min–max and 5–95 %; points where fewer than three were measured. Marks on top are "
        "findings: · note, ▲ warning, ■ critical.",
    )


def signs_part(reader: Reader, run: str, card: HealthCard) -> Folded | None:
    """Return the vital signs as a table; None if there are none."""
    rows = tuple(
        (literal(metric_title(sign.name)), _of(reader, run, sign),
         *(with_unit(value, sign.unit) for value in _trend(sign.values)))
        for sign in card.signs
    )  # fmt: skip
    head = ("vital sign", "of", "first", "lowest", "highest", "last")
    table = Table("", head, rows, numbers=frozenset({2, 3, 4, 5}))
    return Folded("Vital signs", (table,)) if rows else None


def _of(reader: Reader, run: str, sign: Sign) -> str:
    """Return whose values they are; for a median also of how many clients, since few clients make a poor median."""
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


def layers_part(reader: Reader, run: str, pictures: Pictures) -> Folded:
    """Return the section on layers."""
    blocks: list[Block] = []
    families = queries.layer_families(reader, run)
    if "gradient" in families:
        words = "root mean square of every layer's gradient, layers by rounds"
        blocks.append(pictures.of("layers", words, lambda: plot.layers((reader, run))))
        words = "size of the gradient from the first layer to the last"
        blocks.append(pictures.of("gradient-flow", words, lambda: plot.gradient_flow((reader, run))))
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
            draw = functools.partial(plot.layers, (reader, run), "activation.health", statistic)
            blocks.append(pictures.of(f"units-{what}", f"share of {what} units, layers by rounds", draw))
    return Folded("Layers and gradients", tuple(blocks))


def adapters_part(reader: Reader, run: str, pictures: Pictures) -> Folded | None:
    """Return the section on low-rank adapters and the clients' texts; None if there are none."""
    blocks: list[Block] = []
    known = set(queries.metric_names(reader, run))
    if "adapter.effective_rank" in known:
        words = "spectrum and ranks of the adapters, error of the aggregation, and the clients' parts"
        blocks.append(pictures.of("adapters", words, lambda: plot.adapters((reader, run))))
    for sign, words in (
        ("perplexity.before", "perplexity as training begins"),
        ("perplexity.after", "perplexity as training ends"),
        ("train.loss_common", "training loss, common tokens"),
        ("train.loss_rare", "training loss, rare tokens"),
        ("train.loss_short", "training loss, short texts"),
        ("train.loss_long", "training loss, long texts"),
        ("tokens.length", "tokens in a text"),
        ("tokens.padding", "share of padding"),
        ("throughput.tokens", "tokens per second"),
        ("model.flops_utilisation", "model FLOP utilisation"),
        ("adapter.scale", "α/r"),
    ):
        if sign in known:
            draw = functools.partial(plot.clients, (reader, run), sign)
            blocks.append(pictures.of(sign.replace(".", "-"), f"{words} of the clients over the rounds", draw))
    return Folded("Adapters and texts", tuple(blocks)) if blocks else None


def clients_part(reader: Reader, run: str, pictures: Pictures) -> Folded:
    """Return the section on clients."""
    page = clients_page(roster(reader, run), limit=ROWS)
    sign = overview(reader, run).sign
    blocks: list[Block] = []
    if not page.total:
        return Folded("Clients", (Text("No client was seen."),))
    health = ", ".join(f"{count} {name}" for name, count in page.health.items() if count)
    blocks.append(Text(f"{page.total} clients: {health}." if health else f"{page.total} clients."))
    if sign is not None:
        words = f"{literal(sign)} of the clients over the rounds, worst first"
        caption = "Hatched: took no part, or was not measured. Black: not a number."
        blocks.append(pictures.of("clients", words, lambda: plot.clients((reader, run), sign), caption))
    signs = ("loss", "update", "cosine", "time", "bytes", "failures")
    head = ("client", "open findings", "stands out by", "rounds", *signs)
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
    words = "directions of the newest round's updates in a projection: who behaves alike"
    blocks.append(pictures.of("update-map", words, lambda: plot.update_map((reader, run))))
    if page.total > 2:
        words = "cosines between the newest round's updates, clustered"
        blocks.append(pictures.of("similarity", words, lambda: plot.similarity((reader, run))))
    return Folded("Clients", tuple(blocks))


def _row(row: ClientRow) -> tuple[str, ...]:
    cases = "; ".join(f"{literal(case.title)} {literal(case.sure)}" for case in row.cases)
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


LANES, COST_ROWS = 30, 8


def cost_part(reader: Reader, run: str, profile: Profile, pictures: Pictures) -> Folded:
    """Return the section on the costs of the rounds."""
    blocks: list[Block] = []
    if profile.verdict is None:
        blocks.append(Text("No round was timed."))
    else:
        blocks.append(Text(literal(profile.verdict.text)))
        words = f"seconds of each round by part, on the {profile.clock} clock"
        blocks.append(pictures.of("phases", words, lambda: plot.phases((reader, run))))
        blocks += _round(reader, run, profile, pictures)
        blocks += [
            table for table in (_stragglers(profile, labels_of(reader, run)), _remedies(profile)) if table is not None
        ]
    blocks += _memory(profile)
    if profile.traffic.bytes:
        up, down = profile.traffic.up, profile.traffic.down
        pressed = f", compressed {up.compression:.3g} times" if up.compression and up.compression > 1.005 else ""
        own = profile.traffic.telemetry_bytes
        share = f". Telemetry, {size(own)}, is not in these" if own else ""
        both = f"{size(up.bytes)} up{pressed}, {size(down.bytes)} down{share}"
        blocks.append(Text(f"{size(profile.traffic.bytes)} on the wire: {both}."))
        blocks.append(pictures.of("traffic", "bytes of each round, up and down", lambda: draw_traffic(profile.traffic)))
    else:
        blocks.append(
            Text(
                "No transfers were recorded: `monitor.transfer(...)` does that, and the lab by itself.",
                "quiet",
            )
        )
    return Folded("Time, memory and bytes", tuple(blocks))


def _round(reader: Reader, run: str, profile: Profile, pictures: Pictures) -> list[Block]:
    """Return the round that is most worth a look: the longest except for the warm-up."""
    verdict = profile.verdict
    warm = verdict.warm_up.round if verdict is not None and verdict.warm_up is not None else None
    times = [time for time in profile.times if time.round != warm] or list(profile.times)
    if not times:
        return []
    shown = max(times, key=lambda time: time.seconds)
    page = round_page(reader, run, shown.round, clock=profile.clock, limit=LANES)
    words = f"round {shown.round}, node by node, with its critical path outlined"
    return [Text(literal(page.headline)), pictures.of("waterfall", words, lambda: draw_waterfall(page))]


def _stragglers(profile: Profile, labels: Mapping[str, str]) -> Table | None:
    rows = tuple(
        (literal(named(straggler.node, labels), 60), f"{straggler.determined} of {straggler.rounds}",
         seconds(straggler.seconds_lost), literal(straggler.part), seconds(straggler.typical), seconds(straggler.peers))
        for straggler in costly(profile.stragglers, profile.times)[:COST_ROWS]
    )  # fmt: skip
    head = ("client", "rounds determined", "time lost", "slow in", "usually takes", "other clients")
    return Table("Who was waited for", head, rows, numbers=frozenset({1, 2, 4, 5})) if rows else None


def _remedies(profile: Profile) -> Table | None:
    rows = tuple(
        (
            literal(remedy.name),
            seconds(remedy.after),
            f"{'up to ' if remedy.at_most else ''}{whole_percent(remedy.share)}",
            literal(remedy.costs),
        )
        for remedy in profile.remedies[:COST_ROWS]
        if remedy.share > 0.005
    )
    if not rows:
        return None
    now = seconds(profile.remedies[0].before)
    note = f"A round takes {now} now. Computed from its times; `fedvitals profile --try` runs them again, in the lab."
    head = ("what would help", "a round then", "saved", "costs")
    return Table("What would help", head, rows, note, frozenset({1, 2}))


def _memory(profile: Profile) -> list[Block]:
    memory = profile.memory
    if memory is None:
        return [Text("No memory was measured.", "quiet")]
    rows = tuple(
        (literal(metric_title(peak.metric)), size(peak.bytes), literal(peak.node or "the run", 40), str(peak.round),
         f"{'+' if peak.growth_bytes > 0 else ''}{size(peak.growth_bytes)}".replace("-", "−"))
        for peak in memory.peaks[:COST_ROWS]
    )  # fmt: skip
    blocks: list[Block] = [
        Table("Memory", ("memory", "extreme", "of", "round", "growth over the run"), rows, numbers=frozenset({1, 3, 4}))
    ]
    if memory.shares and memory.node is not None:
        parts = ", ".join(f"{name} {size(value)}" for name, value in memory.shares.items())
        batch = f", at batches of {number(memory.batch)}" if memory.batch else ""
        blocks.append(Text(f"Largest in tensors: {literal(memory.node, 40)}: {parts}{batch}."))
    return blocks


SETTINGS, EVENTS = 120, 10
LONGEST = 200  # characters of a setting


def when(at: float | None) -> str:
    """Return a time in UTC, so that a report is the same wherever it is made."""
    if at is None or not 0 < at < 1e11:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def facts_part(reader: Reader, run: str, card: HealthCard) -> Facts:
    status = status_of(reader, run)
    beside = f", and {size(status.telemetry_bytes)} of telemetry" if status.telemetry_bytes else ""
    planned = f" of {status.rounds_planned}" if status.rounds_planned else ""
    shown = [
        ("run", literal(run)),
        ("state", f"{status.state}, begun {when(status.started)}, {seconds(card.summary.seconds)}"),
        ("rounds, clients", f"{status.rounds}{planned}, {status.clients}"),
        ("host, topology", f"{literal(status.host)}, {literal(status.topology or 'not reported')}"),
        ("accuracy, loss", f"{with_unit(card.summary.accuracy, 'share')}, {number(card.summary.loss)}"),
        ("last round", seconds(status.round_seconds)),
        ("bytes", f"{size(status.bytes)}{beside}"),
        ("records lost", str(status.lost)),
        *([("thinned", f"layer statistics of {status.thinned} client-rounds")] if status.thinned else []),
        ("measuring took", "–" if card.cost_percent is None else f"{number(card.cost_percent)} % of the rounds' time"),
    ]
    return Facts(tuple(shown))


def configuration_part(card: HealthCard) -> Folded:
    run = card.run
    settings = {path: leaf for name, value in flattened(run.config).items() for path, leaf in flat(name, value).items()}
    rows = tuple((literal(name, 80), readable(value)) for name, value in sorted(settings.items())[:SETTINGS])
    more = f"and {len(settings) - SETTINGS} more" if len(settings) > SETTINGS else ""
    tables = [table for table in run.tables if table.rows == "parameter"]
    seed = "not reported" if run.seed is None else str(run.seed)
    blocks: list[Block] = [Facts((("seed", seed), ("name", literal(run.name, 80))))]
    if rows:
        blocks.append(Table("Settings", ("setting", "value"), rows, more))
    if tables:
        layers = tuple(
            (literal(layer.name, 80), literal("×".join(map(str, layer.shape)) or "1"), literal(layer.dtype, 20))
            for layer in tables[0].layers[:SETTINGS]
        )
        more = f"and {len(tables[0].layers) - SETTINGS} more" if len(tables[0].layers) > SETTINGS else ""
        blocks.append(Table("Model", ("layer", "shape", "type"), layers, more))
    versions = tuple((literal(name, 60), literal(version, LONGEST)) for name, version in sorted(run.versions.items()))
    blocks.append(
        Table("Versions", ("package", "version"), versions) if versions else Text("No versions were recorded.")
    )
    return Folded("Configuration and versions", tuple(blocks))


def trust_part(reader: Reader, run: str, card: HealthCard, profile: Profile) -> Folded:
    """Return what the judgement is based on, and what was not examined."""
    facts = facts_of(reader, run)
    alarms = facts.false_alarms * facts.rounds / 100
    level, allowed = card.privacy.split(": ", 1)
    cost = "an unknown share" if card.cost_percent is None else f"{number(card.cost_percent)} %"
    everywhere = "" if card.gaps else " at every round"
    points = [
        f"{counted(card.detectors, 'detector')} looked{everywhere}; at {number(facts.false_alarms)} per 100 healthy "
        f"rounds, {number(alarms)} false alarms are to be expected in {facts.rounds} rounds."
        if card.detectors
        else "No detector looked at this run while it trained.",
        f"Records lost: {card.summary.lost}." + (" What they said is not in here." if card.summary.lost else ""),
        f"Measuring took {cost} of the rounds' time.{f' {how_often(card)}' if card.measured else ''}",
        f"Privacy level {level}: {allowed}."
        + (f" Sums cover at least {card.cohort} clients." if level == "1" and card.cohort is not None else ""),
    ]
    if card.gaps:
        points.insert(1, literal(incomplete(card.gaps)))
    elif card.examined is not None:
        points.insert(1, literal(f"They looked at {card.examined}."))
    if card.run.finished is None:
        points.append("The run was still open when this was written.")
    if profile.unaccounted is not None and profile.unaccounted > 0.05:
        points.append(
            f"Of a node's round, up to {whole_percent(profile.unaccounted)} is in no known part (median over rounds)."
        )
    points.append("Lines of more than 240 points are drawn in buckets that keep their lowest and highest value.")
    blocks: list[Block] = [Points(tuple(points))]
    if card.absent:
        rows = tuple((f"`{names}`", needs) for names, needs in card.absent.items())
        blocks.append(Table("Not measured", ("metrics", "what they need"), rows))
    if card.events:
        events = tuple(
            (str(event.where.round if event.where.round is not None else "–"),
             literal(named(event.where.node or "–", card.labels), 60), literal(event.level),
             literal(event.message, 300))
            for event in card.events[-EVENTS:]
        )  # fmt: skip
        note = f"the newest of {len(card.events)}" if len(card.events) > EVENTS else ""
        blocks.append(Table("Warnings and errors", ("round", "node", "level", "message"), events, note))
    return Folded("How sure, and what was not measured", tuple(blocks))
