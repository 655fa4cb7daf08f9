"""Which file of a folder is the log: a run of ours, then what trainers and trackers are known to leave."""

from __future__ import annotations

import re
from pathlib import Path

from palingenesis.errors import RunLogError
from palingenesis.record.format import EVENTS_FILE, RUN_FILE

#: Looked for in this order, newest of each kind first.
_KNOWN = (
    "trainer_state.json",
    "checkpoint-*/trainer_state.json",
    "**/trainer_state.json",
    "trainer_log.jsonl",
    "logging.jsonl",
    "metrics.csv",
    "**/metrics.csv",
    "**/events.out.tfevents.*",
    "**/run-*.wandb",
    "*.db",
    "train.log",
    "*.log",
    "*.jsonl",
    "*.csv",
    "*.out",
)
LOOKED_FOR = (
    "run.json, trainer_state.json, trainer_log.jsonl, logging.jsonl, metrics.csv, TensorBoard event "
    "files, .wandb "
    "files, trackio's .db, *.log, *.jsonl or *.csv"
)


def find_in_folder(folder: Path, source: str) -> Path:
    """The folder itself if it holds a run of ours, else the log in it.

    Raises:
        RunLogError: there is none.
    """
    if any((folder / name).is_file() for name in (RUN_FILE, EVENTS_FILE)):
        return folder
    for pattern in _KNOWN:
        found = [path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size > 0]
        if found:
            return max(found, key=_rank)
    raise RunLogError(f"{source} is a folder without a log: looked for {LOOKED_FOR}; give the file itself")


def _rank(path: Path) -> tuple[int, float]:
    """Later checkpoints know more than earlier ones; else the newest file counts."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.parent.name)
    return int(number[1]) if number else -1, path.stat().st_mtime
