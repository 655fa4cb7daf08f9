"""A recorded run to a tracker: all of it, or what the tracker missed while the run went on."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from palingenesis.errors import PalingenesisError, RecordError
from palingenesis.journal import one_line
from palingenesis.record.folder import open_run_folder
from palingenesis.record.lock import FolderLock
from palingenesis.trackers.base import Tracker
from palingenesis.trackers.choose import make_tracker
from palingenesis.trackers.delivery import REFUSALS, Delivery
from palingenesis.trackers.identity import identify
from palingenesis.trackers.journal import Journal

_log = logging.getLogger("palingenesis")

#: What of run.json a tracker is to show as the run's configuration; lists of layers are too long for it.
_SHOWN = ("config", "model", "optimizer", "parallelism", "versions")


class Synced(NamedTuple):
    """What :func:`sync` did."""

    tracker: str
    run_id: str
    project: str
    name: str
    sent: int  # rows
    already: int  # rows that were there
    refused: list[int]  # steps that the tracker takes no row of
    unreadable: int  # lines of the record that hold no row
    where: str


def sync(
    folder: str | os.PathLike[str],
    to: str,
    *,
    project: str | None = None,
    tracker: Tracker | None = None,
) -> Synced:
    """Send what a tracker lacks of a run. Doing it twice sends nothing twice.

    Args:
        folder: the run's folder. No run may be writing to it.
        to: one of ``palingenesis.trackers.NAMES``.
        project: for a run that no tracker has had yet.
        tracker: to be used in place of the one that ``to`` names.

    Raises:
        RecordError: there is no run in the folder, or one is being written.
        ConfigError, MissingExtraError: there is no such tracker, or its library is not installed.
        PalingenesisError: the tracker refused.
    """
    path, info, _ = open_run_folder(folder)
    try:
        lock = FolderLock(path)
    except OSError as error:
        raise RecordError(
            f"run folder {path} cannot be written: {error.strerror or error}; the run's id in the tracker is "
            "kept in it"
        ) from None
    try:
        identity = identify(path, resume=True, project=project, name=_text(info.get("name")))
        backend = tracker or make_tracker(to, path, identity.project, lazy=True)
        journal, delivery = Journal(path), Delivery(backend)
        config = {key: info[key] for key in _SHOWN if info.get(key) is not None}
        _send(delivery, journal, identity.run_id, identity.name, config)
    finally:
        lock.release()
    return Synced(
        to,
        identity.run_id,
        identity.project,
        identity.name,
        delivery.sent,
        delivery.already,
        sorted(delivery.refused),
        journal.unreadable,
        backend.where,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _send(delivery: Delivery, journal: Journal, run_id: str, name: str, config: dict[str, Any]) -> None:
    backend = delivery.tracker
    tries, reached = REFUSALS + 1, (0, 0)
    while True:
        try:
            delivery.open(run_id, name, config)
            for row in journal.rows():
                delivery.send(row)
            passed = delivery.leftover()
            if passed is not None:
                delivery.send(passed)
            backend.close()
            return
        except Exception as error:
            before, reached = reached, delivery.progress
            tries = tries - 1 if reached == before else REFUSALS
            if tries <= 0:
                raise PalingenesisError(
                    f"{backend.name} failed after {delivery.sent} rows: {one_line(error)}; see that it "
                    "answers, and sync again: what it has is not sent twice"
                ) from error
        try:
            backend.close()
        except Exception as error:  # noqa: BLE001 - it is broken already, and opened anew
            _log.debug("%s could not be closed: %s", backend.name, one_line(error))
