"""SampleOrder: which samples a micro-batch of a run had, on any process, told from its step alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from palingenesis.batch_samples import Place
from palingenesis.sft.ledger import fingerprint_text
from palingenesis.sft.stream import Stream, fingerprint


class SampleOrder:
    """Finds the samples of micro-batches. Costs nothing until it is asked.

    Args:
        stream: all that the run trains on.
        batch: rows of a micro-batch.
        accumulation: micro-batches of a step.
        rank: this process, of ``processes``, which take micro-batches by turns.
    """

    def __init__(self, stream: Stream, *, batch: int, accumulation: int, rank: int, processes: int) -> None:
        self._stream, self._batch, self._accumulation = stream, batch, accumulation
        self._rank, self._processes = rank, processes

    def key(self, step: int, micro: int) -> Hashable:
        """What a micro-batch of a step is found by: its number in the run, of all processes'."""
        return ((step - 1) * self._accumulation + micro) * self._processes + self._rank

    def __call__(self, keys: Sequence[Hashable]) -> list[list[Place] | None]:
        """The samples of micro-batches; ``None`` for one of which not all can be told."""
        numbers = [key for key in keys if isinstance(key, int)]
        wanted = [number * self._batch + row for number in numbers for row in range(self._batch)]
        rows = dict(zip(wanted, self._stream.origins.at(self._stream.dataset, wanted), strict=True))
        found: dict[Hashable, list[Place]] = {}
        for number in numbers:
            batch = [rows[number * self._batch + row] for row in range(self._batch)]
            if all(batch):
                found[number] = [place for row in batch for place in row]
        return [found.get(key) for key in keys]

    def fingerprint(self, step: int) -> str | None:
        """Of all samples of a step, as ``train/batch`` has it."""
        window = self._batch * self._accumulation * self._processes
        first = (step - 1) * window
        dataset = self._stream.dataset
        rows = [dataset[position] for position in range(first, min(first + window, len(dataset)))]
        return fingerprint_text(fingerprint(rows))
