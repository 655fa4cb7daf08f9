"""Checkpoints: which of them are whole, and which one a run goes on from.

The trainer writes a checkpoint file by file. When all are there, on all ranks, a last one is put beside them
that lists them with their sizes: a folder without it, or without one of the files, was cut short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from palingenesis.errors import ConfigError

MARK = "palingenesis_checkpoint.json"
_WAITING = f"{MARK}.part"
#: Where a sharded model's weights and optimizer are, in a checkpoint.
SHARDS = "sharded"
_PREFIX = "checkpoint-"


class Checkpoint(NamedTuple):
    """A checkpoint that is whole."""

    folder: Path
    step: int
    facts: dict[str, Any]


def mark(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Say that a checkpoint is whole. Everything else in it has been written.

    Raises:
        OSError: it cannot be written.
    """
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MARK, _WAITING)
    }
    waiting = folder / _WAITING
    waiting.write_text(json.dumps({"step": step, "facts": dict(facts), "files": files}), encoding="utf-8")
    os.replace(waiting, folder / MARK)


def unmark(folder: Path) -> None:
    """Say that a checkpoint is not whole: its files are about to be written again, one by one."""
    (folder / MARK).unlink(missing_ok=True)


def open_checkpoint(folder: Path) -> Checkpoint | str:
    """A checkpoint, or in words what is wrong with it."""
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
        step, facts, files = int(found["step"]), dict(found["facts"]), dict(found["files"])
    except FileNotFoundError:
        return f"it has no {MARK}: it was not written to its end, or not by `pgs train`"
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        return f"its {MARK} cannot be read ({type(error).__name__})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return Checkpoint(folder, step, facts)


def newest(output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and what was passed over, with the reason."""
    passed_over: list[str] = []
    for folder in sorted(_folders(output_dir), key=_step_of, reverse=True):
        found = open_checkpoint(folder)
        if isinstance(found, Checkpoint):
            return found, passed_over
        passed_over.append(f"{folder}: {found}")
    return None, passed_over


def newer(output_dir: Path, step: int) -> list[Path]:
    """Checkpoints of later steps that pass for whole."""
    later = (folder for folder in _folders(output_dir) if _step_of(folder) > step)
    return sorted(folder for folder in later if (folder / MARK).exists())


def given(path: str) -> Checkpoint:
    """The checkpoint that a user names.

    Raises:
        ConfigError: there is none, or it is not whole.
    """
    try:
        folder = Path(path).expanduser()
        there = folder.is_dir()
    except (OSError, RuntimeError):  # a name too long, a home that nobody has
        there = False
    if not there:
        raise ConfigError(
            f"train.resume_from: there is no folder {path!r}; give a checkpoint's folder, or auto for the "
            "newest"
        )
    found = open_checkpoint(folder)
    if isinstance(found, Checkpoint):
        return found
    raise ConfigError(
        f"train.resume_from: {path!r} cannot be resumed from: {found}; auto takes the newest whole one"
    )


def _folders(output_dir: Path) -> list[Path]:
    return [path for path in output_dir.glob(f"{_PREFIX}*") if path.is_dir() and _step_of(path) >= 0]


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else -1
