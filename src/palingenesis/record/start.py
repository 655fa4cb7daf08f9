"""How a writer takes over a folder: afresh, in place of an old run, or going on with one."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, NamedTuple

from palingenesis.errors import RecordError, RecordExistsError
from palingenesis.record.folder import holds_run, open_run_folder, read_info
from palingenesis.record.format import (
    CHAIN_START,
    EVENTS_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    OWN_FILES,
    RECORD_VERSION,
    RUN_FILE,
    STEP_KEY,
    decode,
    utc_now,
)
from palingenesis.record.lines import cut_torn_line, read_lines
from palingenesis.record.spikes import remove_spikes


class Start(NamedTuple):
    """Where a writer begins."""

    info: dict[str, Any]  # run.json as it will be written
    resumed: bool
    seq: int  # of the last event there
    last_hash: str
    last_step: int  # largest step in the record, 0 in a fresh one


def start_afresh(info: dict[str, Any]) -> Start:
    given = {key: value for key, value in info.items() if key not in _KEPT}
    fresh = {
        "record_version": RECORD_VERSION,
        "run_id": uuid.uuid4().hex,
        "name": info.get("name"),
        "start": utc_now(),
        "end": None,
        **given,
        "resumed_from": [],
        "resumes": [],
    }
    return Start(fresh, resumed=False, seq=0, last_hash=CHAIN_START, last_step=0)


#: What a resumed run keeps of its beginning, whatever the one that resumes it says.
_KEPT = ("record_version", "run_id", "start", "end", "resumed_from", "resumes")


def start_resumed(folder: Path, info: dict[str, Any]) -> Start:
    """Go on with the run in a folder; half a last line is cut off each file first.

    Raises:
        RecordError: run.json is damaged, or of a newer version.
    """
    found = open_run_folder(folder)
    if found.problem is not None and (folder / RUN_FILE).exists():
        raise RecordError(
            f"the run in {folder} cannot be resumed: {found.problem}; mend the file, or use overwrite=True "
            "or another folder"
        )
    for name in (EVENTS_FILE, METRICS_FILE, LAYERS_FILE):
        cut_torn_line(folder / name)
    merged = start_afresh(info).info
    merged.update({key: found.info[key] for key in _KEPT if key in found.info})
    merged.update(end=None, name=info.get("name") or found.info.get("name"))
    seq, last_hash = _end_of_chain(folder)
    return Start(merged, resumed=True, seq=seq, last_hash=last_hash, last_step=last_step(folder))


def _end_of_chain(folder: Path) -> tuple[int, str]:
    """Sequence number and hash to go on from. Damaged lines are for ``verify`` to report."""
    for line in reversed(read_lines(folder / EVENTS_FILE).whole):
        event = _object(line.text)
        seq, digest = event.get("seq"), event.get("hash")
        if isinstance(seq, int) and isinstance(digest, str):
            return seq, digest
    return 0, CHAIN_START


def last_step(folder: Path) -> int:
    """The largest step that the record in a folder holds; 0 where there is none."""
    last = 0
    for name, key in ((EVENTS_FILE, "step"), (METRICS_FILE, STEP_KEY), (LAYERS_FILE, "step")):
        for line in reversed(read_lines(folder / name).whole):
            step = _object(line.text).get(key)
            if isinstance(step, int):
                last = max(last, step)
                break
    return last


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = decode(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def refuse(folder: Path) -> RecordExistsError:
    """The error for a folder that holds a run, saying which."""
    info, problem = read_info(folder)
    end = info.get("end")
    if problem is not None:
        state = problem
    elif isinstance(end, dict):
        state = f"started {info.get('start')}, {end.get('reason')} after {end.get('steps')} steps"
    else:
        state = f"started {info.get('start')}, without an end"
    name = info.get("name")
    run = f"the run {name!r}" if name else "the run"
    return RecordExistsError(
        f"{folder} already holds {run} ({state}): use resume=True to go on with it, "
        "overwrite=True to replace it, or another folder"
    )


def remove_run(folder: Path) -> None:
    """Remove a record's own files and nothing else."""
    for name in OWN_FILES:
        (folder / name).unlink(missing_ok=True)
    remove_spikes(folder)


def take_over(folder: Path, info: dict[str, Any], *, resume: bool, overwrite: bool) -> Start:
    """Decide how to begin in a locked folder.

    Raises:
        RecordExistsError: it holds a run and neither option was given.
        RecordError: the run in it cannot be resumed.
        OSError: it cannot be read or written.
    """
    if holds_run(folder):
        if resume:
            return start_resumed(folder, info)
        if not overwrite:
            raise refuse(folder)
    if overwrite:
        remove_run(folder)
    return start_afresh(info)
