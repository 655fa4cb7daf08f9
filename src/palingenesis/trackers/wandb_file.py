"""What wandb's offline files hold: a log of LevelDB's kind, of protobufs.

A process that is killed loses what wandb had not yet flushed, so only the files tell what is there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palingenesis.record.format import STEP_KEY, decode
from palingenesis.trackers.base import last_steps, need

#: Before the first block: ":W&B", a magic number and a version.
_FILE_HEADER = 7
_BLOCK = 1 << 15
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def offline_files(folder: Path, run_id: str) -> list[Path]:
    """The files of one run, oldest first: each time it is resumed offline there is one more."""
    return sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def held_offline(folder: Path, run_id: str) -> tuple[dict[str, int], int]:
    """The last step of each metric in a run's files, and how many rows there are."""
    held: dict[str, int] = {}
    rows = 0
    for path in offline_files(folder, run_id):
        for row in read_rows(path):
            rows += 1
            step = row.get(STEP_KEY)
            if isinstance(step, (int, float)):
                last_steps(held, int(step), {key: None for key in row if not key.startswith("_")})
    return held, rows


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as they were logged, with wandb's own ``_step``, ``_timestamp`` and ``_runtime``."""
    record = need("wandb.proto.wandb_internal_pb2", "wandb").Record
    for data in whole_records(path.read_bytes()):
        found = record.FromString(data)
        if found.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): decode(item.value_json.encode())
                for item in found.history.item
            }


def whole_records(data: bytes) -> Iterator[bytes]:
    """Every whole record; what a kill left of the last one is left out."""
    position, parts = _FILE_HEADER, b""
    while position + _CHUNK.size <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _CHUNK.size:
            position += room
            continue
        _, length, kind = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        chunk = data[position : position + length]
        position += length
        if len(chunk) < length or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            return
        parts = chunk if kind in (_WHOLE, _FIRST) else parts + chunk
        if kind in (_WHOLE, _LAST):
            yield parts
