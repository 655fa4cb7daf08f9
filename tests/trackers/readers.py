"""What a run left in each backend, read by other code than what wrote it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from palingenesis.record.format import STEP_KEY
from palingenesis.trackers.wandb_file import offline_files, read_rows

#: Rows of a run in a backend: step, name, value.
Cells = list[tuple[int, str, float]]


def identity(run: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((run / "tracker_run_id.json").read_text())
    return found


def from_wandb(run: Path) -> Cells:
    cells: Cells = []
    for path in offline_files(run / "wandb", identity(run)["run_id"]):
        for found in read_rows(path):
            cells += [
                (found[STEP_KEY], key, value)
                for key, value in found.items()
                if key != STEP_KEY and not key.startswith("_")
            ]
    return cells


def from_trackio(run: Path) -> Cells:
    with sqlite3.connect(run.parent / "trackio" / "proj.db") as database:
        rows = database.execute(
            "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (identity(run)["run_id"],)
        ).fetchall()
    cells: Cells = []
    for step, text in rows:
        found = json.loads(text)
        assert found.pop(STEP_KEY) == step
        cells += [(step, key, float(value)) for key, value in found.items()]
    return cells


def from_tensorboard(run: Path) -> Cells:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run / "tensorboard").glob(f"*-{identity(run)['run_id']}")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (found.step, tag, found.value) for tag in events.Tags()["scalars"] for found in events.Scalars(tag)
    ]


def from_mlflow(run: Path) -> Cells:
    cells: Cells = []
    (found,) = [
        path.parent.parent
        for path in run.glob("mlruns/*/*/tags/palingenesis.run_id")
        if path.read_text() == identity(run)["run_id"]
    ]
    for path in (found / "metrics").rglob("*"):
        if path.is_file():
            for line in path.read_text().splitlines():
                _, value, step = line.split()[:3]
                cells.append((int(step), str(path.relative_to(found / "metrics")), float(value)))
    return cells


class Backend(NamedTuple):
    name: str
    read: Callable[[Path], Cells]


BACKENDS = [
    Backend("wandb", from_wandb),
    Backend("trackio", from_trackio),
    Backend("tensorboard", from_tensorboard),
    Backend("mlflow", from_mlflow),
]
