"""``tracker_run_id.json``: one training is one run in every tracker, however often it is restarted."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from palingenesis.record.folder import read_info
from palingenesis.record.format import decode, pretty

IDENTITY_FILE = "tracker_run_id.json"
DEFAULT_PROJECT = "palingenesis"

_log = logging.getLogger("palingenesis")


class Identity(NamedTuple):
    """What a run is called in the trackers."""

    run_id: str
    project: str
    name: str
    record: str | None  # run_id of the record it belongs to, where there was one


def identify(
    folder: str | os.PathLike[str],
    *,
    resume: bool,
    project: str | None = None,
    name: str | None = None,
) -> Identity:
    """The identity of a run, kept in its folder.

    Args:
        folder: the run's folder, with its record opened if it has one.
        resume: go on with the run whose identity is there. Otherwise, or where the one there is of another
            run, a new one is made: a tracker that took a fresh start for the old run would drop its rows.
        project, name: what to call it; a resumed run keeps what it was called.
    """
    path = Path(folder)
    record = _record_id(path)
    found = _read(path / IDENTITY_FILE) if resume else None
    if found is not None and (record is None or found.record in (None, record)):
        return found
    identity = Identity(
        uuid.uuid4().hex[:16],
        project or DEFAULT_PROJECT,
        name or path.resolve().name or DEFAULT_PROJECT,
        record,
    )
    _write(path, identity)
    return identity


def _record_id(folder: Path) -> str | None:
    try:
        run_id = read_info(folder)[0].get("run_id")
    except OSError:  # what is wrong with the folder shows when the identity is written
        return None
    return run_id if isinstance(run_id, str) else None


def _read(path: Path) -> Identity | None:
    try:
        found = decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read (%s): the trackers get a new run", path, error)
        return None
    entry: dict[str, object] = found if isinstance(found, dict) else {}
    run_id, project, name, record = (
        value if isinstance(value, str) and value else None for value in map(entry.get, Identity._fields)
    )
    if run_id is None or project is None or name is None:
        _log.warning("%s holds no run_id, project and name: the trackers get a new run", path)
        return None
    return Identity(run_id, project, name, record)


def _write(folder: Path, identity: Identity) -> None:
    temporary = folder / f"{IDENTITY_FILE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(pretty(identity._asdict()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / IDENTITY_FILE)
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s): a resumed run will be another one in the trackers",
            folder / IDENTITY_FILE,
            error.strerror or error,
        )
