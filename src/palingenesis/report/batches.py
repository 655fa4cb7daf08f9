"""What was in the batch when the loss spiked, as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palingenesis.record.spikes import MicroBatch, Sample, Spike
from palingenesis.report.words import count, number, step_number, visible

MOST_SPIKES = 40
_SAMPLES = 32
_LONG_TEXT = 400
_LONG_NAME = 120
_FIRST_TOKENS = 12
#: What stands where nothing is known.
UNKNOWN = "–"


@dataclass(frozen=True)
class SampleRow:
    """One sample of a batch."""

    batch: str
    name: str
    tokens: str
    text: str
    others: str


@dataclass(frozen=True)
class SpikeView:
    """One spike with its samples."""

    anchor: str
    step: str
    severity: str
    message: str
    about: str
    samples: list[SampleRow]
    left_out: int
    before: list[SampleRow]
    """Samples of the step before, whose update may be the cause."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Spikes:
    """What the page shows of them."""

    shown: list[SpikeView]
    left_out: int
    repeated: list[str]
    """Samples that were in more than one of the batches."""


def spikes_of(spikes: Sequence[Spike]) -> Spikes:
    """The first spikes, and the samples that several of them share."""
    shown = spikes[:MOST_SPIKES]
    return Spikes([_view(spike) for spike in shown], len(spikes) - len(shown), _repeated(spikes))


def _view(spike: Spike) -> SpikeView:
    told = []
    if spike.loss is not None:
        usual = "" if spike.baseline is None else f", usually {number(spike.baseline)}"
        told.append(f"loss {number(spike.loss)}{usual}")
    if spike.ranks > 1:
        told.append(f"rank {spike.rank} of {spike.ranks}")
    if spike.batch:
        told.append(f"batch {visible(spike.batch, _LONG_NAME)}")
    samples, left_out = _rows(spike.microbatches)
    before, _ = _rows(spike.before)
    return SpikeView(
        anchor=f"spike-{spike.step}-{spike.rank}",
        step=step_number(spike.step),
        severity=spike.severity if spike.severity in ("info", "warning", "critical") else "warning",
        message=visible(spike.message or spike.event.replace("_", " "), _LONG_TEXT),
        about="; ".join(told),
        samples=samples,
        left_out=left_out,
        before=before,
        notes=tuple(visible(note, _LONG_TEXT) for note in spike.notes),
    )


def _rows(batches: Sequence[MicroBatch]) -> tuple[list[SampleRow], int]:
    rows = [_row(place, batch, sample) for place, batch in enumerate(batches, 1) for sample in batch.samples]
    hidden = sum(batch.left_out for batch in batches)
    return rows[:_SAMPLES], hidden + max(0, len(rows) - _SAMPLES)


def _row(place: int, batch: MicroBatch, sample: Sample) -> SampleRow:
    loss = "" if batch.loss is None else f", loss {number(batch.loss)}"
    tokens = UNKNOWN if sample.tokens is None else count(sample.tokens, "token")
    if sample.loss_tokens is not None:
        tokens += f", {sample.loss_tokens:,} with loss"
    text = sample.text
    if text is None and sample.first_tokens:
        text = "first tokens " + " ".join(str(token) for token in sample.first_tokens[:_FIRST_TOKENS])
    others = "; ".join(f"{name} {value}" for name, value in sample.values.items())
    return SampleRow(
        batch=f"{place}{loss}",
        name=visible(sample.name, _LONG_NAME),
        tokens=tokens,
        text=visible(text or UNKNOWN, _LONG_TEXT),
        others=visible(others, _LONG_TEXT),
    )


def _repeated(spikes: Sequence[Spike]) -> list[str]:
    """Samples of known place that several spikes share: the likeliest to be at fault."""
    seen: dict[str, set[int]] = {}
    for spike in spikes:
        for sample in spike.samples:
            if sample.row is not None or sample.index is not None:
                seen.setdefault(sample.name, set()).add(spike.step)
    shared = sorted(
        ((name, steps) for name, steps in seen.items() if len(steps) > 1), key=lambda one: -len(one[1])
    )
    return [
        f"{visible(name, _LONG_NAME)} ({count(len(steps), 'spike')})" for name, steps in shared[:_SAMPLES]
    ]
