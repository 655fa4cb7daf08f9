"""What was in the batch when the loss spiked or was not finite: ``spikes/step_N.json``, written and read.

A file holds the samples of that step and of the step before it, whose update may be the cause. Of several
ranks each writes what it trained on itself: ``step_N.json`` is that of rank 0, ``step_N-rank_R.json`` of
another.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palingenesis.errors import RecordError
from palingenesis.record.format import EVENTS_FILE, RECORD_VERSION, decode, number, pretty
from palingenesis.record.lines import read_lines

SPIKES_FOLDER = "spikes"

_NAME = re.compile(r"step_(\d+)(?:-rank_(\d+))?\.json")


@dataclass(frozen=True)
class Sample:
    """One sample of a batch; what is not known of it is ``None`` or empty.

    Attributes:
        index: its place in the data set that was trained on, from 0.
        source: name of the source it comes from.
        row: its number there: the line of a ``.jsonl`` file, from 1.
        tokens, loss_tokens: without padding; how many of them bear loss.
        first_tokens: ids of the first tokens.
        text: beginning and end as text.
        values: anything else that tells one sample from another, by name.
    """

    index: int | None = None
    source: str | None = None
    row: int | None = None
    tokens: int | None = None
    loss_tokens: int | None = None
    first_tokens: tuple[int, ...] = ()
    text: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Where the sample can be found, in a few words."""
        if self.row is not None:
            return f"{self.source or 'data'} row {self.row}"
        if self.index is not None:
            return f"{self.source or 'data set'} index {self.index}"
        return self.source or "a sample of unknown place"


@dataclass(frozen=True)
class MicroBatch:
    """The samples that went through the model together.

    Attributes:
        samples: in their order.
        loss: its part of the step's loss, as the training loop has it.
        left_out: samples that it had besides.
        shapes: of its tensors, by name.
    """

    samples: tuple[Sample, ...] = ()
    loss: float | None = None
    left_out: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Spike:
    """A loss spike, or a value that was not finite, and the batch of its step.

    Attributes:
        step: the optimizer step.
        event: ``loss_spike`` or ``nonfinite``.
        severity, message: as the event in ``events.jsonl`` has them.
        loss, baseline: of the step, and what is usual.
        time: when it was noticed, in ISO 8601.
        rank: the process whose samples these are, of ``ranks``.
        batch: fingerprint of the whole step's samples (``train/batch``), where batches carry one.
        microbatches: of the step.
        before: of the step before it.
        notes: what is not known of the samples, and why, a sentence each.
    """

    step: int
    event: str
    severity: str = "warning"
    message: str = ""
    loss: float | None = None
    baseline: float | None = None
    time: str = ""
    rank: int = 0
    ranks: int = 1
    batch: str | None = None
    microbatches: tuple[MicroBatch, ...] = ()
    before: tuple[MicroBatch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples of the step, on this rank."""
        return tuple(sample for batch in self.microbatches for sample in batch.samples)

    @property
    def samples_before(self) -> tuple[Sample, ...]:
        """Those of the step before."""
        return tuple(sample for batch in self.before for sample in batch.samples)


def spike_file(folder: Path, step: int, rank: int) -> Path:
    """Where a rank keeps what it knows of a step."""
    other = f"-rank_{rank}" if rank else ""
    return folder / SPIKES_FOLDER / f"step_{step}{other}.json"


def write_spike(folder: Path, spike: Spike) -> Path:
    """Write a spike into a run folder, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file = spike_file(folder, spike.step, spike.rank)
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_suffix(".tmp")
    try:
        temporary.write_bytes(pretty({"record_version": RECORD_VERSION, **_plain(asdict(spike))}))
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return file


def read_spikes(folder: str | os.PathLike[str]) -> list[Spike]:
    """The spikes of a run, in the order of their steps; none where nothing was kept.

    Those of steps that a resumed run did again are left out, and so is a file that cannot be read.

    Raises:
        RecordError: the folder cannot be read.
    """
    path = Path(folder)
    try:
        resumes = list(_resumes(path))
        files = sorted((path / SPIKES_FOLDER).iterdir()) if (path / SPIKES_FOLDER).is_dir() else []
        found = [spike for spike in map(_read, files) if spike is not None]
    except OSError as error:
        raise RecordError(
            f"the spikes in {path} cannot be read: {error.strerror or error}; expected files you may read"
        ) from None
    kept = [spike for spike in found if not _done_again(spike, resumes)]
    return sorted(kept, key=lambda spike: (spike.step, spike.rank))


def remove_spikes(folder: Path) -> None:
    """Remove what :func:`write_spike` wrote, and the folder if nothing else is in it.

    Raises:
        OSError: it cannot be removed.
    """
    spikes = folder / SPIKES_FOLDER
    if not spikes.is_dir():
        return
    for file in spikes.iterdir():
        if _NAME.fullmatch(file.name):
            file.unlink()
    with contextlib.suppress(OSError):  # someone else's files stay
        spikes.rmdir()


# -- reading -----------------------------------------------------------------------------------------------


def _read(file: Path) -> Spike | None:
    if not _NAME.fullmatch(file.name):
        return None
    try:
        value = decode(file.read_bytes())
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return _spike(step, value) if isinstance(step, int) else None


def _spike(step: int, value: Mapping[str, Any]) -> Spike:
    return Spike(
        step=step,
        event=str(value.get("event", "")),
        severity=str(value.get("severity", "warning")),
        message=str(value.get("message", "")),
        loss=_number(value.get("loss")),
        baseline=_number(value.get("baseline")),
        time=str(value.get("time", "")),
        rank=_integer(value.get("rank")) or 0,
        ranks=_integer(value.get("ranks")) or 1,
        batch=_text(value.get("batch")),
        microbatches=tuple(map(_micro_batch, _objects(value.get("microbatches")))),
        before=tuple(map(_micro_batch, _objects(value.get("before")))),
        notes=tuple(map(str, _list(value.get("notes")))),
    )


def _micro_batch(value: Mapping[str, Any]) -> MicroBatch:
    shapes = value.get("shapes")
    return MicroBatch(
        samples=tuple(map(_sample, _objects(value.get("samples")))),
        loss=_number(value.get("loss")),
        left_out=_integer(value.get("left_out")) or 0,
        shapes={str(name): tuple(_list(shape)) for name, shape in shapes.items()}
        if isinstance(shapes, dict)
        else {},
    )


def _sample(value: Mapping[str, Any]) -> Sample:
    others = value.get("values")
    return Sample(
        index=_integer(value.get("index")),
        source=_text(value.get("source")),
        row=_integer(value.get("row")),
        tokens=_integer(value.get("tokens")),
        loss_tokens=_integer(value.get("loss_tokens")),
        first_tokens=tuple(_list(value.get("first_tokens"))),
        text=_text(value.get("text")),
        values=others if isinstance(others, dict) else {},
    )


def _number(value: Any) -> float | None:
    return None if value is None else number(value)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _plain(value: Any) -> Any:
    """Without what says nothing, so that files are short."""
    if isinstance(value, Mapping):
        told = {name: _plain(one) for name, one in value.items()}
        return {name: one for name, one in told.items() if one not in (None, (), [], {})}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _resumes(folder: Path) -> Iterator[tuple[str, int]]:
    """When the run was resumed, and from which step."""
    for line in read_lines(folder / EVENTS_FILE).whole:
        if b'"run_resumed"' not in line.text:
            continue
        try:
            event = decode(line.text)
        except ValueError:  # for the reader of events to tell
            continue
        if isinstance(event, dict) and isinstance(event.get("from_step"), int):
            yield str(event.get("time", "")), event["from_step"]


def _done_again(spike: Spike, resumes: Sequence[tuple[str, int]]) -> bool:
    return any(spike.time < when and spike.step > step for when, step in resumes)
