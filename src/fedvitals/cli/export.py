# SPDX-License-Identifier: Apache-2.0
"""`fedvitals export RUN --to ...`: a stored run for the tools that users already have."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import number
from fedvitals.errors import ConfigError, FedvitalsError

if TYPE_CHECKING:
    from fedvitals.protocols import Sink
    from fedvitals.records import Record, Run
    from fedvitals.store.read.reader import Reader

T = TypeVar("T")
R = TypeVar("R", bound="Record")
FORMS = ("perfetto", "parquet", "arrow", "csv", "tensorboard", "mlflow", "wandb", "otel")
BATCH = 2000  # records at a time, as a live sink receives them
TELL_SECONDS = 2.0


@click.command(
    epilog="perfetto: a trace for ui.perfetto.dev. parquet, arrow, csv: every table (docs/schema.md) as a file. "
    "tensorboard, mlflow, wandb: curves and histograms. otel: spans and metrics, to --endpoint. See docs/exporters.md."
)
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="Format to export to.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The file or folder to write. The default depends on the format, and is printed.",
)
@click.option("--round", "round_", type=int, metavar="N", help="This round only.")
@click.option("--endpoint", metavar="URL", help="Of otel: the receiver. Of mlflow: the tracking server or database.")
@run_options
def command(
    run: str | None,
    form: str,
    out: Path | None,
    round_: int | None,
    endpoint: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Export a stored run to the format of another tool.

    RUN is a run's id, the beginning of one, or a name (its newest run); without it, the newest run of all.
    """
    from fedvitals.store.read import queries

    if endpoint is not None and form not in ("otel", "mlflow"):
        raise ConfigError(f"--endpoint is for otel and mlflow; --to {form} writes to --out.")
    if out is not None and form == "otel":
        raise ConfigError("--to otel sends to --endpoint and writes nothing; --out does not apply.")
    with opened_run(store, run) as (reader, run_id):
        chosen = queries.get_run(reader, run_id)
        if round_ is not None and round_ not in (rounds := reader.history(chosen.id).rounds()):
            known = f"It has rounds {rounds[0]} to {rounds[-1]}." if rounds else "It has no rounds."
            raise ConfigError(f"Run {chosen.id} has nothing of round {round_}. {known}")
        try:
            export = _WRITERS[form](reader, chosen, out, round_, endpoint)
        except OSError as error:
            where = f"'{out}'" if out is not None else "this folder"
            raise ConfigError(
                f"The export cannot be written to {where} ({error.strerror or error}"
                f"{f': {error.filename}' if error.filename else ''}). Choose another --out, or mend the cause."
            ) from error
    result = {"run": chosen.id, "to": form, "round": round_, **export}
    if as_json:
        print_json("export", result)
        return
    for file in export.get("files", ()):
        click.echo(f"{file['rows']:>10}  {file['path']}")
    click.echo(f"{number(export['count'])} {export['what']} → {export['where']}")
    click.echo(export["open"])


Export = dict[str, Any]
"""`where` the result is, `records` or `rows` in it, and how to `open` it."""


def _label(run: Run) -> str:
    """Return a file name for a run, from its own name, which may contain anything."""
    name = re.sub(r"[^\w.-]+", "_", run.name).strip("._")[:60]
    identity = re.sub(r"[^\w.-]+", "_", run.id)[:60]
    return f"{name}-{identity}" if name else identity


def _counted(things: Iterable[T], what: str, count: list[int]) -> Iterator[T]:
    """Yield the same things; reports progress if it takes long, and leaves their number in `count`."""
    last = time.monotonic()
    for thing in things:
        count[0] += 1
        if count[0] % 1000 == 0 and time.monotonic() - last > TELL_SECONDS:
            last = time.monotonic()
            click.echo(f"… {count[0]:,} {what}", err=True)
        yield thing


def _perfetto(reader: Reader, run: Run, out: Path | None, round_: int | None, _endpoint: str | None) -> Export:
    from fedvitals.records import Event, Finding, Metric, Span, Transfer
    from fedvitals.sinks.parquet import whole
    from fedvitals.sinks.perfetto import perfetto
    from fedvitals.store.read.paging import records_of_kind

    path = out or Path(f"{_label(run)}{'' if round_ is None else f'-round-{round_}'}.trace.json")
    count = [0]

    def of(kind: type[R]) -> Iterator[R]:
        return _counted(records_of_kind(reader, run.id, kind, round_), "records", count)

    about: Any = {"events": of(Event), "transfers": of(Transfer), "findings": of(Finding), "metrics": of(Metric)}
    pieces = perfetto(run, of(Span), **about)
    with whole(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    how = "Open it: ui.perfetto.dev, «Open trace file» (it stays on this machine), or chrome://tracing."
    return {"where": str(path), "count": count[0], "what": "records", "open": how}


def _tables(form: str) -> Callable[..., Export]:
    def write(reader: Reader, run: Run, out: Path | None, round_: int | None, _endpoint: str | None) -> Export:
        from fedvitals.sinks.parquet import check_form, write_table
        from fedvitals.store.read.tables import plain_tables

        check_form(form)
        folder = out or Path(f"{_label(run)}-{form}")
        files: list[dict[str, Any]] = []
        total = 0
        for table in plain_tables(reader, run.id, round_):
            count = [0]
            batches = ([*_counted(batch, f"rows of {table.name}", count)] for batch in table.batches)
            path = write_table(folder, table.name, table.columns, batches, form)
            files.append({"table": table.name, "path": str(path), "rows": count[0]})
            total += count[0]
        first = folder / f"metrics{Path(files[0]['path']).suffix}"
        reads = {"parquet": "pandas.read_parquet", "arrow": "pandas.read_feather", "csv": "pandas.read_csv"}[form]
        how = f'Open one: {reads}("{first}"); columns: docs/schema.md.'
        return {"where": str(folder), "count": total, "what": "rows", "files": files, "open": how}

    return write


def _fed(reader: Reader, run: Run, round_: int | None, sink: Sink) -> Export:
    """Feed the run to a sink as a training would have. Returns the number of records."""
    from fedvitals.store.read.paging import records_in_order

    count, batch, written = [0], [], 0
    try:
        for record in _counted(records_in_order(reader, run.id, round_), "records", count):
            if not isinstance(record, sink.ignores):
                batch.append(record)
            if len(batch) == BATCH:
                sink.write(batch)
                written, batch = written + len(batch), []
        sink.write(batch)
        written += len(batch)
        sink.close()
    except FedvitalsError:
        raise
    except Exception as error:
        name = sink.name or type(sink).__name__
        raise FedvitalsError(
            f"{name} failed: {type(error).__name__}: {error}. "
            + (f"It has taken {written} records, and perhaps more." if written else "It has taken nothing so far.")
            + " Mend the cause and export again."
        ) from error
    return {"count": count[0], "what": "records"}


def _store_of(reader: Reader) -> str:
    """Return the store as it may be shown to others: its full path, or its address without a password."""
    shown = reader.database.target
    return shown if "://" in shown else str(Path(shown).absolute())


def _tensorboard(reader: Reader, run: Run, out: Path | None, round_: int | None, _endpoint: str | None) -> Export:
    from fedvitals.sinks.tensorboard import TensorBoard

    sink = TensorBoard(out or Path("tb"), store=_store_of(reader))
    fed = _fed(reader, run, round_, sink)
    how = f"Open it: tensorboard --logdir {sink.folder}"
    return {"where": str(sink.folder_of(run.id)), **fed, "open": how}


def _mlflow(reader: Reader, run: Run, out: Path | None, round_: int | None, endpoint: str | None) -> Export:
    from fedvitals.sinks.mlflow import MLflow

    if out is not None and endpoint is not None:
        raise ConfigError("--to mlflow writes to a database file (--out) or to an address (--endpoint), not to both.")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # this process is ours, and sends nothing unless asked
    sink = MLflow(f"sqlite:///{out.absolute()}" if out is not None else endpoint, store=_store_of(reader))
    fed = _fed(reader, run, round_, sink)
    where = sink.uri if sink.uri.startswith(("http:", "https:")) else f"--backend-store-uri {sink.uri}"
    how = f"Open it: {where}" if where == sink.uri else f"Open it: mlflow ui {where}"
    return {"where": f"{sink.uri} run {sink.run_of(run.id)}", **fed, "open": how}


def _wandb(reader: Reader, run: Run, out: Path | None, round_: int | None, _endpoint: str | None) -> Export:
    from fedvitals.sinks.wandb import WeightsAndBiases

    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # as above
    sink = WeightsAndBiases(folder=out or Path(), store=_store_of(reader))
    fed = _fed(reader, run, round_, sink)
    where = sink.folders[run.id]
    how = f"Upload it, if you want: wandb sync {where}. Look at it here: wandb beta leet {where}"
    return {"where": str(where), **fed, "open": how}


def _otel(reader: Reader, run: Run, _out: Path | None, round_: int | None, endpoint: str | None) -> Export:
    from fedvitals.sinks.otel.sink import OpenTelemetry

    sink = OpenTelemetry(endpoint)
    fed = _fed(reader, run, round_, sink)
    how = "Look for the service «fedvitals» in the tool behind it (Jaeger, Grafana Tempo, ...)."
    return {"where": sink.endpoint, **fed, "open": how}


_WRITERS: dict[str, Callable[[Any, Any, Path | None, int | None, str | None], Export]] = {
    "perfetto": _perfetto,
    "parquet": _tables("parquet"),
    "arrow": _tables("arrow"),
    "csv": _tables("csv"),
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "otel": _otel,
}
