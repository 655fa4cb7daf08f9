"""Where numbers go besides the record: wandb, trackio, TensorBoard, MLflow.

:func:`start` puts each into a thread of its own; :func:`palingenesis.trackers.sync.sync` brings a recorded
run to one of them. Nothing here imports torch, and a backend's own library is imported when it is asked for.
"""

from __future__ import annotations

from palingenesis.trackers.base import Row, Tracker
from palingenesis.trackers.choose import NAMES, make_tracker, start
from palingenesis.trackers.identity import Identity, identify
from palingenesis.trackers.journal import Journal
from palingenesis.trackers.limits import Limits
from palingenesis.trackers.queue import Worker, close_all

__all__ = [
    "NAMES",
    "Identity",
    "Journal",
    "Limits",
    "Row",
    "Tracker",
    "Worker",
    "close_all",
    "identify",
    "make_tracker",
    "start",
]
