"""Every sample of a run, in the order in which it is trained on, before the first step.

The order follows from the data, the configuration and the number of processes alone, and nothing is shuffled
later, so a run is resumed by leaving out what came before. What is kept is the samples of each source once,
as Arrow columns, and the order as numbers; packed rows are made epoch by epoch and kept too.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.data import (
    Account,
    MaskOptions,
    Prepared,
    Quarantine,
    Source,
    join,
    mix,
    order,
    pack,
    prepare,
)
from palingenesis.sft.data.packing import LENGTHS
from palingenesis.sft.places import Origins, PackedRows, PlainRows, list_lengths

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset  # type: ignore[import-untyped]
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import SourceOptions, TrainConfig

Collate = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]

log = logging.getLogger("palingenesis")

FINGERPRINT_BITS = 48
"""Sums of so many bits stay exact in every number format that a record or a tracker may turn them into."""

# Sets the draws for packed rows apart from those for the order of samples.
_PACKED_ROWS = 2


@dataclass(frozen=True)
class Stream:
    """The run's samples, to be taken one after the other.

    Attributes:
        dataset: columns ``input_ids``, ``labels``, and ``seq_lengths`` where packed, else ``source``.
        steps: optimizer steps; the last one may have fewer micro-batches than the others.
        steps_per_epoch: how many of them are one epoch, on average where packed.
        accounts: what became of the rows of each source.
        left_out: rows at the end that do not fill a micro-batch on every process.
        sources: titles, in the order of the configuration.
        origins: where samples come from.
    """

    dataset: Dataset
    steps: int
    steps_per_epoch: float
    accounts: tuple[Account, ...]
    left_out: int
    sources: tuple[str, ...]
    origins: PlainRows | PackedRows


def training_sources(config: TrainConfig) -> list[Source]:
    """What is trained on."""
    data = config.data
    if data.sources:
        return _several(data.sources)
    return [Source(str(data.dataset), data.dataset_split, messages_field=data.messages_field)]


def evaluation_sources(config: TrainConfig) -> list[Source]:
    """What is evaluated on; nothing if there is none."""
    data = config.data
    if data.eval_sources:
        return _several(data.eval_sources)
    if data.eval_dataset is None:
        return []
    return [Source(data.eval_dataset, data.eval_split, messages_field=data.messages_field)]


def mask_options(config: TrainConfig) -> MaskOptions:
    """What of a sample is trained."""
    data = config.data
    return MaskOptions(
        max_length=data.max_seq_length,
        last_turn_only=data.last_turn_only,
        train_on_reasoning=data.train_on_reasoning,
        include_observations=data.include_observations,
    )


def training_stream(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, quarantine: Quarantine, *, world_size: int
) -> Stream:
    """Read, encode and order all that the run trains on.

    Raises:
        ConfigError: a source cannot be used or has too many bad rows, or there is not one full batch.
    """
    sources = training_sources(config)
    parts = [_prepare(config, source, tokenizer, quarantine) for source in sources]
    train = config.train
    batch = train.per_device_batch_size * world_size
    window = batch * train.gradient_accumulation_steps
    wanted = None if train.max_steps is None else train.max_steps * window
    weights = [source.weight for source in sources]
    origins = _origins(parts, weights, config.train.seed)
    places: PlainRows | PackedRows
    if config.data.packing:
        dataset, per_epoch, places = _packed(config, parts, weights, wanted, origins)
    else:
        dataset, per_epoch = _unpacked(config, parts, weights, wanted)
        places = PlainRows(origins)
    there = len(dataset) if wanted is None else min(wanted, len(dataset))
    left_out = there % batch
    kept = there - left_out
    if not kept:
        raise ConfigError(
            f"the data gives {there} rows in all, and one batch takes {batch} (train.per_device_batch_size "
            f"{train.per_device_batch_size} on {world_size} processes): give more data, more train.epochs or "
            "a smaller batch" + (", or set data.packing to false" if config.data.packing else "")
        )
    if left_out:
        log.info(
            "%d of %d rows are left out at the end: they do not fill a batch on every process",
            left_out,
            there,
        )
    return Stream(
        dataset=dataset.select(range(kept)),
        steps=math.ceil(kept / window),
        steps_per_epoch=per_epoch / window,
        accounts=tuple(part.account for part in parts),
        left_out=left_out,
        sources=tuple(source.title for source in sources),
        origins=places,
    )


def evaluation_sets(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, quarantine: Quarantine
) -> dict[str, Dataset]:
    """What is evaluated on, by title: unpacked, each in the order of its file.

    Raises:
        ConfigError: a source cannot be used or has too many bad rows.
    """
    most = config.data.eval_samples
    with read_for_evaluation(config):
        return {
            source.title: _prepare(config, source, tokenizer, quarantine, most).dataset.select_columns(
                ["input_ids", "labels"]
            )
            for source in evaluation_sources(config)
        }


@contextmanager
def read_for_evaluation(config: TrainConfig) -> Iterator[None]:
    """The time in which sources are read for evaluation: what reads them names the options of training."""
    option = "data.eval_sources" if config.data.eval_sources else "data.eval_dataset"
    try:
        yield
    except ConfigError as error:
        told = str(error).replace("data.dataset_split", "data.eval_split").replace("data.dataset", option)
        if told == str(error):
            raise
        raise ConfigError(told) from None


def fingerprinting(collate: Collate) -> Collate:
    """``collate``, with an int64 tensor ``fingerprint`` of shape ``[1]`` added to its batches.

    It is the sum over rows of a hash of each, so that the sum over a window's batches, modulo
    ``2 ** FINGERPRINT_BITS``, is the same however the window is cut into micro-batches and over ranks.
    """
    return partial(_with_fingerprint, collate)  # unlike a closure, it can be sent to a worker process


def fingerprint(rows: Sequence[Mapping[str, Any]]) -> int:
    """The sum of the rows' hashes, modulo ``2 ** FINGERPRINT_BITS``."""
    return sum(map(_hash, rows)) % (1 << FINGERPRINT_BITS)


# -- parts -------------------------------------------------------------------------------------------------


def _several(entries: Sequence[SourceOptions]) -> list[Source]:
    return [
        Source(entry.dataset, entry.split, entry.mode, entry.messages_field, entry.weight, entry.name or "")
        for entry in entries
    ]


def _prepare(
    config: TrainConfig,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    quarantine: Quarantine,
    most: int | None = None,
) -> Prepared:
    prepared = prepare(source, tokenizer, quarantine, options=mask_options(config), limit=most)
    account = prepared.account
    share, allowed = 100 * account.skipped / account.read, config.preprocess.max_bad_rows_pct
    if share > allowed:
        where = f"; all are in {quarantine.path}" if quarantine.path is not None else ""
        raise ConfigError(
            f"{account.source}: {account.skipped} of {account.read} rows ({share:.3g}%) cannot be used, and "
            f"preprocess.max_bad_rows_pct allows {allowed:g}; mostly because "
            f"({quarantine.example(account.source)}){where}"
        )
    log.info("%s", account.told())
    return prepared


def _unpacked(
    config: TrainConfig, parts: Sequence[Prepared], weights: Sequence[float], wanted: int | None
) -> tuple[Dataset, float]:
    """The samples of all epochs as one choice from the joined sources, and rows an epoch."""
    import numpy as np

    sizes = [len(part.dataset) for part in parts]
    per_epoch = sum(sizes)
    epochs = config.train.epochs if wanted is None else math.ceil(wanted / per_epoch)
    # What `mix` gives for each epoch, without a table for each.
    rows = np.concatenate(
        [order(sizes, weights, seed=config.train.seed, epoch=epoch) for epoch in range(epochs)]
    )
    dataset = join(parts).select_columns(["input_ids", "labels", "source"]).select(rows)
    return dataset, float(per_epoch)


def _origins(parts: Sequence[Prepared], weights: Sequence[float], seed: int) -> Origins:
    """Where samples come from, without their tokens."""
    import numpy as np

    sizes = [len(part.dataset) for part in parts]
    samples = join(parts).select_columns(["source", "row"])
    lengths = np.concatenate([list_lengths(part.dataset, "input_ids") for part in parts])
    return Origins(samples, lengths, sizes, weights, seed)


def _packed(
    config: TrainConfig,
    parts: Sequence[Prepared],
    weights: Sequence[float],
    wanted: int | None,
    origins: Origins,
) -> tuple[Dataset, float, PackedRows]:
    """The packed rows of all epochs, how many there are in an epoch on average, and where they come from."""
    from datasets import concatenate_datasets

    epochs, counts, orders = [], [], []
    for packed, rows in _packed_epochs(config, parts, weights):
        # Packing puts rows of one long sample first and rows of many short ones last.
        epochs.append(packed.select(rows))
        counts.append(list_lengths(packed, LENGTHS))
        orders.append(rows)
        done = len(epochs) >= config.train.epochs if wanted is None else sum(map(len, epochs)) >= wanted
        if done:
            break
    dataset = concatenate_datasets(epochs)
    places = PackedRows(origins, int(config.data.max_seq_length or 0), counts, orders)
    return dataset, len(dataset) / len(epochs), places


def _packed_epochs(
    config: TrainConfig, parts: Sequence[Prepared], weights: Sequence[float]
) -> Iterator[tuple[Dataset, NDArray[np.int64]]]:
    """One epoch's packed rows after the other's, each with the order they are taken in, without end."""
    import numpy as np

    seed, length = config.train.seed, config.data.max_seq_length
    if length is None:
        raise ConfigError("data.packing needs a length to pack to: set data.max_seq_length")
    epoch = 0
    while True:
        packed = pack(mix(parts, weights, seed=seed, epoch=epoch), length)
        yield packed, np.random.default_rng([seed, epoch, _PACKED_ROWS]).permutation(len(packed))
        epoch += 1


def _with_fingerprint(collate: Collate, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    return {**collate(rows), "fingerprint": torch.tensor([fingerprint(rows)], dtype=torch.int64)}


def _hash(row: Mapping[str, Any]) -> int:
    import numpy as np

    digest = hashlib.blake2b(digest_size=FINGERPRINT_BITS // 8)
    for column in ("input_ids", "labels"):
        digest.update(np.asarray(row[column], dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")
