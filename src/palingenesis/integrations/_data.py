"""Which samples of a data set were in a batch, found out afterwards from how the loader makes batches.

Nothing is listened to while training goes on: samplers that draw from a seed of their own are run again, as
copies, when a spike asks for it. Where the order cannot be had again (a sampler that draws from the global
random numbers, a stream), places are not known, and what the batch itself holds has to do.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from palingenesis.batch_samples import Place

_TEXTS = ("text", "messages", "prompt", "completion", "conversations")
_SOURCES = ("source", "dataset", "dataset_name", "task", "domain")
_NOT_VALUES = frozenset({"input_ids", "labels", "attention_mask", "seq_lengths", "position_ids"})
#: Other columns are told of if they are as short as that.
_LONGEST_VALUE = 200


class LoaderOrder:
    """Finds the samples of batches by the epoch and the number of the batch in it, both from 0.

    Args:
        loader: the training loop's, on this rank.
        data: what its indices count, with all columns; the loader's own data set by default.
    """

    def __init__(self, loader: Any, data: Any = None) -> None:
        self._batches = getattr(loader, "batch_sampler", None)
        own = getattr(loader, "dataset", None)
        self._data = data if data is not None and _length(data) == _length(own) else own

    def __call__(self, keys: Sequence[Hashable]) -> list[list[Place] | None]:
        """The samples of batches, each named by ``(epoch, number)``."""
        wanted = [key for key in keys if isinstance(key, tuple)]
        found: dict[Hashable, list[Place]] = {}
        for epoch in sorted({epoch for epoch, _ in wanted}):
            numbers = {number for one, number in wanted if one == epoch}
            for number, indices in self._again(epoch, max(numbers)):
                if number in numbers:
                    found[epoch, number] = [place for index in indices for place in self._places(index)]
        return [found.get(key) for key in keys]

    def _again(self, epoch: int, last: int) -> Iterator[tuple[int, Sequence[int]]]:
        batches = _copied(self._batches, epoch)
        if batches is None:
            return
        for number, indices in enumerate(batches):
            yield number, indices
            if number == last:
                return

    def _places(self, index: int) -> list[Place]:
        row = _row(self._data, index)
        if row is None:
            return [Place(index)]
        ids, labels = _tokens(row.get("input_ids")), _tokens(row.get("labels"))
        source = next((str(row[name]) for name in _SOURCES if row.get(name) is not None), None)
        text = next((row[name] for name in _TEXTS if row.get(name)), None)
        if text is not None and not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False, default=str)
        values = {name: value for name, value in row.items() if _is_short(value) and name not in _SOURCES}
        if ids is None:
            return [Place(index, source, text=text, values=values)]
        lengths = row.get("seq_lengths") or [len(ids)]
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [
            Place(
                index,
                source,
                ids=ids[end - size : end],
                labels=labels and labels[end - size : end],
                text=text if len(lengths) == 1 else None,
                values=values,
            )
            for size, end in zip(lengths, ends, strict=True)
        ]


class TrainerOrder(LoaderOrder):
    """The same for a trainer that counts optimizer steps through all epochs, as transformers' does.

    Args:
        loader: the trainer's.
        data: its training data, with all columns.
        accumulation: micro-batches of a step; the last step of an epoch may have fewer.
    """

    def __init__(self, loader: Any, data: Any, accumulation: int) -> None:
        super().__init__(loader, data)
        self._accumulation, batches = accumulation, _length(loader)
        self._steps = None if batches is None else max(math.ceil(batches / accumulation), 1)

    def key(self, step: int, micro: int) -> tuple[int, int] | None:
        """What a micro-batch of a step is found by: both numbers from where they begin, 1 and 0."""
        if self._steps is None:
            return None
        epoch, window = divmod(step - 1, self._steps)
        return epoch, window * self._accumulation + micro

    def fingerprint(self, step: int) -> str | None:
        """Batches of this trainer carry none."""
        return None


class Order(Protocol):
    """Tells micro-batches apart while training goes on, and finds their samples afterwards."""

    def key(self, step: int, micro: int) -> Hashable:
        """What a micro-batch of a step is found by."""

    def __call__(self, keys: Sequence[Hashable]) -> Sequence[Sequence[Place] | None]:
        """The samples of micro-batches."""

    def fingerprint(self, step: int) -> str | None:
        """Of the samples of a step on all processes, where rows of metrics have one."""


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _row(data: Any, index: int) -> Mapping[str, Any] | None:
    """A row, if reading it changes nothing: a data set of one's own may draw random numbers for it."""
    if type(data) is list:
        row = data[index]
    elif type(data).__module__.startswith("datasets.") and hasattr(data, "with_format"):
        row = data.with_format(None)[index]
    else:
        return None
    return row if isinstance(row, Mapping) else None


def _tokens(value: Any) -> list[int] | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, list) and (not value or isinstance(value[0], int)) else None


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_VALUE
    return isinstance(value, (int, float, bool))


# -- batches again -----------------------------------------------------------------------------------------


def _copied(batches: Any, epoch: int) -> Any:
    """A batch sampler like this one, at the beginning of an epoch; ``None`` where the order is lost."""
    name = type(batches).__name__
    if name == "BatchSamplerShard":  # accelerate's, around the whole run's
        inner = _copied(batches.batch_sampler, epoch)
        return None if inner is None else _with(batches, batch_sampler=inner)
    if type(batches) is not BatchSampler:
        return None
    sampler = _sampler_copied(batches.sampler, epoch)
    return None if sampler is None else _with(batches, sampler=sampler)


def _sampler_copied(sampler: Any, epoch: int) -> Any:
    if type(sampler) is SequentialSampler:
        return sampler
    if (
        type(sampler).__name__ == "SeedableRandomSampler"
    ):  # accelerate's; it seeds its generator anew by epoch
        return _with(sampler, generator=None, epoch=epoch)
    if type(sampler) is DistributedSampler:
        return _with(sampler, epoch=epoch)
    return None


def _with(original: Any, **changes: Any) -> Any:
    copied = copy.copy(original)
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied
