"""trackio: a SQLite file a project, in ``$TRACKIO_DIR``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from palingenesis.record.format import STEP_KEY
from palingenesis.trackers.base import last_steps, need


class TrackioTracker:
    """Writes through trackio's storage, each row at once, under the run's own id.

    ``trackio.init`` would not do: it prints to stdout, it resumes whichever run of this *name* is newest, its
    sender keeps rows for half a second, and drops those that it cannot write without telling.
    """

    name = "trackio"

    def __init__(self, project: str) -> None:
        self._storage = need("trackio.sqlite_storage", "trackio").SQLiteStorage
        self._project = project
        self._run_id = self._name = ""
        self._config: dict[str, Any] | None = None  # until it is written
        self.where = str(self._storage.get_project_db_path(project))

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> Mapping[str, int]:
        self._storage.validate_project_name(self._project)
        self._storage.init_db(self._project)
        self._run_id, self._name = run_id, name
        held: dict[str, int] = {}
        for row in self._storage.get_logs(self._project, name, run_id=run_id):
            last_steps(held, int(row["step"]), row)
        # trackio keeps names that begin with an underscore for itself, and shows this one.
        self._config = {**config, "_Created": datetime.now(timezone.utc).isoformat()} if not held else None
        return held

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._storage.bulk_log(
            project=self._project,
            run=self._name,
            run_id=self._run_id,
            metrics_list=[{**values, STEP_KEY: step}],
            steps=[step],
            timestamps=[datetime.fromtimestamp(time, timezone.utc).isoformat()],
            config=self._config,
            # The same row twice is one row to trackio, whoever sends it.
            log_ids=[_log_id(self._run_id, step, values)],
        )
        self._config = None

    def close(self) -> None:
        """Every row is in the file already."""


def _log_id(run_id: str, step: int, values: Mapping[str, float]) -> str:
    text = json.dumps([run_id, step, sorted(values)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
