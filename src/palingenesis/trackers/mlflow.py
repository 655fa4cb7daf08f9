"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or files in the run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palingenesis.trackers.base import need

#: MLflow gives a run an id of its own; ours is a tag by which it is found again.
_TAG = "palingenesis.run_id"
#: What MLflow takes in one request, and of one parameter.
_METRICS, _PARAMS, _TEXT = 1000, 100, 6000
_UNFIT = re.compile(r"[^\w\-./: ]")


class MlflowTracker:
    """Uses MLflow's client only: no active run, so that one of the user's is left alone."""

    name = "mlflow"

    def __init__(self, folder: Path, project: str) -> None:
        # It would report its use to its makers from the training process; who wants that says so here.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = need("mlflow")
        self._entities = need("mlflow.entities", "mlflow")
        self._folder, self._project = folder / "mlruns", project
        self._client: Any = None
        self._run: str | None = None
        self._had: Mapping[str, int] = {}  # by the names that MLflow has, which may differ from ours
        self.where = os.environ.get("MLFLOW_TRACKING_URI") or str(self._folder)

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> Mapping[str, int]:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow 3 asks for this word before it writes files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = self._folder.resolve().as_uri()
        client = self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(self._project)
        place = experiment.experiment_id if experiment else client.create_experiment(self._project)
        found = client.search_runs([place], filter_string=f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            self._had = self._held(client.get_run(self._run))
            return self._had
        run = client.create_run(place, run_name=name, tags={_TAG: run_id})
        self._run = run.info.run_id
        params = [self._entities.Param(key, value) for key, value in _flat(config)]
        for part in _parts(params, _PARAMS):
            client.log_batch(self._run, params=part)
        return {}

    def _held(self, run: Any) -> dict[str, int]:
        return {
            key: max(entry.step for entry in self._client.get_metric_history(self._run, key))
            for key in run.data.metrics
        }

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        when = int(1000 * time)
        metrics = [
            self._entities.Metric(fitting(key), value, when, step)
            for key, value in values.items()
            if self._had.get(fitting(key), -1) < step
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=part)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._run is not None:
            client.set_terminated(self._run)


def fitting(key: str) -> str:
    """A name that MLflow takes: a sign it does not know becomes an underscore."""
    return _UNFIT.sub("_", key)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield fitting(name), str(value)[:_TEXT]


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
