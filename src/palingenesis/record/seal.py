"""The seal: what metrics.jsonl and layers.jsonl came to at the end of a run.

Their rows are in no chain, since a hash a row would cost more than the row. Instead the event that ends the
run, which is in the chain, holds the length and the digest of both files as they were then. A resumed run
goes on behind that; each of its ends seals what stands before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from palingenesis.record.format import LAYERS_FILE, METRICS_FILE

#: Bytes read at a time.
_BLOCK = 1 << 20
#: The files that are sealed, by what their fields begin with.
_SEALED = {"metrics": METRICS_FILE, "layers": LAYERS_FILE}


class Seal(NamedTuple):
    """What an end of the run says of one file."""

    step: int
    bytes: int
    sha256: str


def seal_of(folder: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The fields of an end: length and digest of the first so many bytes of each file.

    Raises:
        OSError: a file cannot be read, or is shorter than that.
    """
    fields: dict[str, Any] = {}
    for name, file in _SEALED.items():
        size = sizes[file]
        (digest,) = _digests(folder / file, [size])
        if digest is None:
            raise OSError(f"{file} is shorter than the {size} bytes written to it")
        fields |= {f"{name}_bytes": size, f"{name}_sha256": digest}
    return fields


def seals_in(event: Mapping[str, Any]) -> dict[str, Seal] | None:
    """The seals that an event of the record holds, by file; ``None`` where it holds none."""
    found: dict[str, Seal] = {}
    step = event.get("step")
    for name, file in _SEALED.items():
        size, digest = event.get(f"{name}_bytes"), event.get(f"{name}_sha256")
        if not isinstance(step, int) or not isinstance(size, int) or not isinstance(digest, str) or size < 0:
            return None
        found[file] = Seal(step, size, digest)
    return found


def broken(folder: Path, ends: Sequence[Mapping[str, Seal]], *, nothing_after: bool) -> str | None:
    """The first thing that is wrong with a sealed file; ``None`` if nothing is.

    Args:
        folder: the run's folder.
        ends: what each end sealed, in the order of the record.
        nothing_after: the last of them is the end of the record, and nothing may stand behind it.

    Raises:
        OSError: a file cannot be read.
    """
    for file in _SEALED.values():
        problem = _broken_file(folder / file, [end[file] for end in ends], nothing_after=nothing_after)
        if problem is not None:
            return f"{file} {problem}"
    return None


def _broken_file(path: Path, seals: Sequence[Seal], *, nothing_after: bool) -> str | None:
    if not seals:
        return None
    if not path.exists():
        return f"is missing: it held {seals[-1].bytes} bytes at the end at step {seals[-1].step}"
    for seal, digest in zip(seals, _digests(path, [seal.bytes for seal in seals]), strict=True):
        if digest is None:
            return f"was cut short: it held {seal.bytes} bytes at the end at step {seal.step}"
        if digest != seal.sha256:
            return f"was altered: what stood in it at the end at step {seal.step} is not there any more"
    size, last = path.stat().st_size, seals[-1]
    if nothing_after and size > last.bytes:
        return f"was added to: it has {size} bytes, and held {last.bytes} at the end at step {last.step}"
    return None


def _digests(path: Path, sizes: Sequence[int]) -> list[str | None]:
    """The digest of the first so many bytes of a file, for each size, in one pass over it.

    ``None`` where the file has fewer.
    """
    found: dict[int, str] = {}
    running, position = hashlib.sha256(), 0
    with path.open("rb") as file:
        for size in sorted(set(sizes)):
            while position < size and (block := file.read(min(_BLOCK, size - position))):
                running.update(block)
                position += len(block)
            if position == size:
                found[size] = running.copy().hexdigest()
    return [found.get(size) for size in sizes]
