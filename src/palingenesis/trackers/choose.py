"""Trackers by name."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palingenesis.errors import ConfigError
from palingenesis.trackers.base import Tracker, need
from palingenesis.trackers.identity import identify
from palingenesis.trackers.journal import Journal
from palingenesis.trackers.limits import Limits
from palingenesis.trackers.queue import Worker

_log = logging.getLogger("palingenesis")

NAMES = ("wandb", "trackio", "tensorboard", "mlflow")


def make_tracker(name: str, folder: str | os.PathLike[str], project: str, *, lazy: bool = False) -> Tracker:
    """A tracker that is not open yet. Its library is imported here, before training and not beside it.

    Args:
        name: one of ``NAMES``.
        folder: where a tracker that writes files has them.
        project: what runs are gathered under.
        lazy: leave nothing behind if no row comes.

    Raises:
        ConfigError: there is no such tracker.
        MissingExtraError: its library is not installed.
    """
    path = Path(folder)
    if name == "wandb":
        from palingenesis.trackers.wandb import WandbTracker

        return WandbTracker(path, project, lazy=lazy)
    if name == "trackio":
        from palingenesis.trackers.trackio import TrackioTracker

        return TrackioTracker(project)
    if name == "tensorboard":
        from palingenesis.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(path)
    if name == "mlflow":
        from palingenesis.trackers.mlflow import MlflowTracker

        return MlflowTracker(path, project)
    raise ConfigError(f"no tracker {name!r}: expected one of {', '.join(NAMES)}")


def require(names: Iterable[str]) -> None:
    """See that the libraries of some trackers are there, before anything costly begins.

    Raises:
        MissingExtraError: one is not installed.
    """
    for name in names:
        need(name)


def start(
    names: Iterable[str],
    folder: str | os.PathLike[str],
    *,
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_from: int | None = None,
    limits: Limits | None = None,
) -> list[Worker]:
    """Start trackers for the run in a folder, whose record is open. On one rank only.

    Waits until they have answered, or ``limits.open`` seconds: the last wait but the one at the end.

    Args:
        names: some of ``NAMES``.
        folder: the run's folder.
        project, name: what the run is called; by default the folder's name, in the project "palingenesis".
        config: what the trackers are to show as the run's configuration.
        resumed_from: the step that a resumed run goes on from; ``None`` for a fresh one, which gets a new id.
        limits: how long a tracker may take.

    Raises:
        ConfigError, MissingExtraError: see :func:`make_tracker`.
    """
    identity = identify(folder, resume=resumed_from is not None, project=project, name=name)
    trackers = [make_tracker(each, folder, identity.project) for each in names]
    journals = [Journal(folder, resumed_from) for _ in trackers]
    workers = [
        Worker(tracker, identity, config or {}, journal, limits)
        for tracker, journal in zip(trackers, journals, strict=True)
    ]
    seconds = (limits or Limits()).open
    deadline = time.monotonic() + seconds
    for worker in workers:
        if not worker.wait_until_open(max(0.0, deadline - time.monotonic())):
            _log.warning(
                "%s has not answered within %.0f s: training goes on, and it gets its rows when it does",
                worker.tracker.name,
                seconds,
            )
    return workers
