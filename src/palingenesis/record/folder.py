"""Which folders hold a run, and whether this version can read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from palingenesis.errors import RecordError
from palingenesis.record.format import EVENTS_FILE, RECORD_VERSION, RUN_FILE, RUN_FILES, decode


class RunFolder(NamedTuple):
    path: Path
    info: dict[str, Any]  # run.json, empty where it cannot be read
    problem: str | None  # what is wrong with run.json


def holds_run(folder: Path) -> bool:
    """Whether anything of a run is in the folder (empty files are not)."""
    return any((folder / name).is_file() and (folder / name).stat().st_size > 0 for name in RUN_FILES)


def open_run_folder(folder: str | os.PathLike[str]) -> RunFolder:
    """The folder and its run.json.

    Raises:
        RecordError: no folder, an empty one, one without a run, or a record of a newer version.
    """
    path = Path(folder)
    try:
        _require_run(path)
        info, problem = read_info(path)
        _require_readable_version(path, info.get("record_version", RECORD_VERSION), RUN_FILE)
        _require_readable_version(path, _version_in_first_event(path), EVENTS_FILE)
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(
            f"run folder {path} cannot be read: {reason}; expected a folder you may read"
        ) from None
    if "record_version" not in info and not (path / EVENTS_FILE).is_file():
        raise RecordError(
            f"{path} holds a {RUN_FILE} that is not of this program and no {EVENTS_FILE}: "
            "give the folder that was passed to Monitor(out=…)"
        )
    return RunFolder(path, info, problem)


def _require_run(path: Path) -> None:
    if not path.exists():
        raise RecordError(f"no run folder at {path}: give the folder that was passed to Monitor(out=…)")
    if not path.is_dir():
        raise RecordError(f"{path} is a file, expected a run folder: give the folder that holds {RUN_FILE}")
    if not any(path.iterdir()):
        raise RecordError(f"run folder {path} is empty: expected {RUN_FILE} and {EVENTS_FILE} in it")
    if not any((path / name).is_file() for name in (RUN_FILE, EVENTS_FILE)):
        raise RecordError(
            f"{path} holds no run: expected {RUN_FILE} and {EVENTS_FILE} in it; give the folder that was "
            "passed to Monitor(out=…)"
        )


def read_info(path: Path) -> tuple[dict[str, Any], str | None]:
    """run.json of a folder, and what is wrong with it if it cannot be used."""
    try:
        info = decode((path / RUN_FILE).read_bytes())
    except FileNotFoundError:
        return {}, f"{RUN_FILE} is missing"
    except ValueError as error:
        return {}, f"{RUN_FILE} cannot be read as JSON ({error})"
    if not isinstance(info, dict):
        return {}, f"{RUN_FILE} holds no JSON object"
    return info, None


def _version_in_first_event(path: Path) -> Any:
    try:
        with (path / EVENTS_FILE).open("rb") as file:
            first = decode(file.readline())
    except (FileNotFoundError, ValueError):  # what is wrong with the line is for its readers to say
        return RECORD_VERSION
    return first.get("record_version", RECORD_VERSION) if isinstance(first, dict) else RECORD_VERSION


def _require_readable_version(path: Path, version: Any, where: str) -> None:
    if not isinstance(version, int) or version < 1:
        raise RecordError(
            f"{where} in {path} says record_version {version!r}, expected a number from 1 to "
            f"{RECORD_VERSION}: the file is damaged or of another program"
        )
    if version > RECORD_VERSION:
        raise RecordError(
            f"{where} in {path} has record version {version}, this palingenesis reads up to "
            f"{RECORD_VERSION}: upgrade palingenesis to read it"
        )
