# SPDX-License-Identifier: Apache-2.0
"""A sink that logs to an MLflow tracking server or a local database, through MLflow's client.

    Monitor("runs.db", sinks=[MLflow("sqlite:///mlflow.db")])        then:  mlflow ui --backend-store-uri sqlite:///mlflow.db

MLflow no longer accepts folders (`file:./mlruns`) unless MLFLOW_ALLOW_FILE_STORE is set. MLflow's global settings are
not touched: what the user tracks besides this stays where it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.protocols import Sink
from fedvitals.records import LayerStats, Metric, Record, Run
from fedvitals.sinks.curves import NODES, Curves, Point, link_of, settings_of, tags_of
from fedvitals.sinks.spread import all_but, plain

DEFAULT = "sqlite:///mlflow.db"  # MLflow's own default
METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100  # MLflow's limits for one call
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")


class MLflow(Sink):
    """A sink that logs to MLflow: metrics per round, settings as parameters, layer histograms as JSON artifacts.

    The run's id becomes a tag; a run that was logged there before is continued.

    Args:
        uri: The address of a tracking server or database; by default MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db`
            here.
        experiment: The experiment that runs are logged to.
        nodes: How many clients get curves of their own, or which ones.
        layers_of: Nodes whose layers are shown, beside those of the whole round.
        store: The file or address of the store, to be mentioned in the run's description.
    """

    name = "mlflow"
    ignores = all_but(LayerStats, Metric)

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "fedvitals",
        *,
        nodes: int | Sequence[str] = NODES,
        layers_of: Sequence[str] = (),
        store: str | os.PathLike[str] | None = None,
    ) -> None:
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT
        try:
            self._tracking: Any = importlib.import_module("mlflow.tracking")
            self._entities: Any = importlib.import_module("mlflow.entities")
            self._errors: Any = importlib.import_module("mlflow.exceptions")
        except ImportError as error:
            raise MissingExtraError("mlflow-skinny", "mlflow", "The MLflow exporter") from error
        self._check()
        self._experiment, self._experiment_id = experiment, ""
        self._store = store
        self._curves = Curves(nodes, layers_of)
        self._client: Any = None
        self._runs: dict[str, str] = {}  # our ids → MLflow's
        self._known: dict[str, Run] = {}
        self._logged: dict[str, set[str]] = {}  # parameters, which MLflow accepts only once

    def _check(self) -> None:
        """Raise an error for what cannot work now, rather than from a worker during training."""
        if self.uri.startswith(DATABASES):
            for package in ("sqlalchemy", "alembic"):  # mlflow-skinny lacks them until a database is used
                if importlib.util.find_spec(package) is None:
                    raise MissingExtraError(package, "mlflow", f"MLflow with the database {self.uri.split(':')[0]}")
        elif "://" not in self.uri or self.uri.startswith("file:"):
            try:
                self._tracking.MlflowClient(tracking_uri=self.uri)
            except self._errors.MlflowException as error:
                raise ConfigError(f"MLflow does not take '{self.uri}': {error} Try MLflow('{DEFAULT}').") from error

    def write(self, records: Sequence[Record], /) -> None:
        """Log what is new. Raises what MLflow raises; the queue then tries again.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        if self._client is None:
            client = self._tracking.MlflowClient(tracking_uri=self.uri)
            self._experiment_id = self._find_experiment(client)
            self._client = client
        for record in records:
            if isinstance(record, Run):
                self._open(record)
        self._log(records)
        for record in records:
            if isinstance(record, Run) and record.finished is not None:
                self._client.set_terminated(self._of(record.id), "FINISHED", round(record.finished * 1000))

    def _log(self, records: Sequence[Record]) -> None:
        points: dict[str, list[Any]] = {}
        bars: dict[tuple[str, int], dict[str, Any]] = {}
        for drawn in self._curves.of(records):
            if isinstance(drawn, Point):
                metric = self._entities.Metric(_key(drawn.tag), drawn.value, round(drawn.at * 1000), drawn.round)
                points.setdefault(drawn.run, []).append(metric)
            else:
                histogram = {"edges": drawn.edges.tolist(), "counts": drawn.counts.tolist()}
                bars.setdefault((drawn.run, drawn.round), {})[drawn.tag] = histogram
        for run, metrics in points.items():
            for start in range(0, len(metrics), METRICS_AT_ONCE):
                self._client.log_batch(self._of(run), metrics=metrics[start : start + METRICS_AT_ONCE])
        for (run, number), histograms in bars.items():
            self._client.log_dict(self._of(run), histograms, f"histograms/round-{number:05d}.json")

    def run_of(self, run: str) -> str | None:
        """Return MLflow's id of a run.

        Args:
            run: The run's id in fedvitals.

        Returns:
            The id in MLflow.
        """
        return self._runs.get(run)

    def _find_experiment(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        # A local database keeps artifacts in the current folder, wherever the database is: they belong beside it.
        local = re.fullmatch(r"sqlite:///([^?]+).*", self.uri)
        beside = None if local is None else (Path(local[1]).absolute().parent / "mlruns").as_uri()
        return str(client.create_experiment(self._experiment, artifact_location=beside))

    def _of(self, run: str) -> str:
        if run not in self._runs:
            self._open(Run(run, run))
        return self._runs[run]

    def _open(self, run: Run) -> None:
        """Create or find MLflow's run, and update it with what is new about ours."""
        tags = {**tags_of(run), "mlflow.note.content": link_of(run, self._store)}
        if run.id not in self._runs:
            mlflow_run = self._find(run.id)
            if mlflow_run is None:
                created = self._client.create_run(
                    self._experiment_id, round(run.started * 1000), tags, run_name=plain(run.name)
                )
                mlflow_run = created.info.run_id
            self._runs[run.id] = mlflow_run
        entities, logged = self._entities, self._logged.setdefault(run.id, set())
        new = {_key(name): value for name, value in settings_of(run).items() if _key(name) not in logged}
        if self._known.get(run.id) != run:
            tags_now = [entities.RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(self._runs[run.id], tags=tags_now[:PARAMETERS_AT_ONCE])
        parameters = [entities.Param(name, value) for name, value in new.items()]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._runs[run.id], params=parameters[start : start + PARAMETERS_AT_ONCE])
        logged.update(new)
        self._known[run.id] = run

    def _find(self, run: str) -> str | None:
        """Return a run that was logged before: by a continued training, or by a call that failed half-way."""
        if not re.fullmatch(r"[\w.-]+", run):  # it goes into a query
            return None
        matching = self._client.search_runs([self._experiment_id], f"tags.`fedvitals.run` = '{run}'", max_results=1)
        for mlflow_run in matching:
            self._logged.setdefault(run, set()).update(mlflow_run.data.params)
            return str(mlflow_run.info.run_id)
        return None


def _key(tag: str) -> str:
    """Return the tag with only the characters that MLflow allows, and without leaving its folder."""
    kept = re.sub(r"[^\w./ -]", "_", tag, flags=re.ASCII)
    parts = [part for part in kept.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:250] or "_"
