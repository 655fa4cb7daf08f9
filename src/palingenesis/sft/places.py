"""Where samples of a run come from: source and row, found when a spike asks for them.

The order of a run follows from sizes, weights and a seed, so nothing is kept for this but how long samples
are. Which of them share a packed row is found by packing the same lengths once more, and taken for true only
if the rows come out as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from palingenesis.batch_samples import Place
from palingenesis.sft.data import order
from palingenesis.sft.data.packing import LENGTHS, pack

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset  # type: ignore[import-untyped]
    from numpy.typing import NDArray

#: Samples that are packed with one another: what ``datasets`` maps at a time.
_PACKED_TOGETHER = 1000
_READ_TOGETHER = 10_000


@dataclass(frozen=True)
class Origins:
    """The samples of all sources end to end, and how they are mixed.

    Attributes:
        samples: columns ``source`` and ``row``.
        lengths: tokens of each.
        sizes, weights: of the sources.
        seed: of the order.
    """

    samples: Dataset
    lengths: NDArray[np.int64]
    sizes: Sequence[int]
    weights: Sequence[float]
    seed: int

    def mixed(self, epoch: int) -> NDArray[np.int64]:
        """Indices of the samples in the order of an epoch."""
        return order(self.sizes, self.weights, seed=self.seed, epoch=epoch)

    def place(self, index: int, ids: Sequence[int], labels: Sequence[int]) -> Place:
        """A sample, with the tokens that were trained on."""
        found = self.samples[index]
        return Place(index, found["source"], found["row"], ids, labels)


@dataclass(frozen=True)
class PlainRows:
    """Rows that are one sample each."""

    origins: Origins

    def at(self, dataset: Dataset, positions: Iterable[int]) -> list[list[Place]]:
        """The sample at each of some positions of the run."""
        mixed = cache(self.origins.mixed)  # for this one call
        found = []
        for position in positions:
            epoch, number = divmod(position, sum(self.origins.sizes))
            row = dataset[position]
            place = self.origins.place(int(mixed(epoch)[number]), row["input_ids"], row["labels"])
            found.append([place])
        return found


@dataclass(frozen=True)
class PackedRows:
    """Rows that are several samples each.

    Attributes:
        length: of a row at most.
        counts: for each epoch, how many samples each row has, in the order of packing.
        rows: for each epoch, which of these rows comes when.
    """

    origins: Origins
    length: int
    counts: Sequence[NDArray[np.int64]]
    rows: Sequence[NDArray[np.int64]]

    def at(self, dataset: Dataset, positions: Iterable[int]) -> list[list[Place]]:
        """The samples of the rows at some positions of the run; none if they cannot be told for sure."""
        again = cache(self._packed_again)  # for this one call
        found = []
        for position in positions:
            epoch, number = self._epoch_of(position)
            row = dataset[position]
            indices = self._indices(epoch, int(self.rows[epoch][number]), again)
            same = self.origins.lengths[indices].tolist() == row[LENGTHS]
            found.append(self._places(indices, row) if same else [])
        return found

    def _epoch_of(self, position: int) -> tuple[int, int]:
        epoch = 0
        while position >= len(self.rows[epoch]):
            position -= len(self.rows[epoch])
            epoch += 1
        return epoch, position

    def _places(self, indices: Sequence[int], row: Mapping[str, Any]) -> list[Place]:
        found, start = [], 0
        for index, end in zip(indices, accumulate(row[LENGTHS]), strict=True):
            found.append(self.origins.place(index, row["input_ids"][start:end], row["labels"][start:end]))
            start = end
        return found

    def _indices(
        self, epoch: int, row: int, packed_again: Callable[[int, int], list[list[int]]]
    ) -> list[int]:
        """The samples of a row, counted in the order of packing, by packing those around it again."""
        import numpy as np

        before = np.cumsum([0, *self.counts[epoch]])
        start = int(before[row]) // _PACKED_TOGETHER * _PACKED_TOGETHER
        again = packed_again(epoch, start)
        first = int(np.searchsorted(before, start))
        counts = self.counts[epoch][first : first + len(again)]
        same = before[first] == start and [len(one) for one in again] == counts.tolist()
        return again[row - first] if same else []

    def _packed_again(self, epoch: int, start: int) -> list[list[int]]:
        """Which of the samples from one on come together in each row. Only lengths decide that."""
        from datasets import Dataset

        samples = self.origins.mixed(epoch)[start : start + _PACKED_TOGETHER]
        ids = [[number] * int(self.origins.lengths[index]) for number, index in enumerate(samples)]
        packed = pack(Dataset.from_dict({"input_ids": ids, "labels": ids}), self.length)
        return [
            [int(samples[row["input_ids"][end - 1]]) for end in accumulate(row[LENGTHS])] for row in packed
        ]


def list_lengths(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """How long a column's lists are, without making Python's lists of them."""
    import numpy as np
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    parts = dataset.select_columns([column]).with_format("arrow").iter(batch_size=_READ_TOGETHER)
    lengths = [pc.list_value_length(part[column]).to_numpy() for part in parts]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.empty(0, dtype=np.int64)
