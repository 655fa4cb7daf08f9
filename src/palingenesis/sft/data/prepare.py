"""From sources to a data set that is ready to train on, with an account of what became of every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.data.masking import Encoded, Masker, MaskOptions, encode_text
from palingenesis.sft.data.messages import normalize, text_of, tools_of
from palingenesis.sft.data.mixture import order
from palingenesis.sft.data.quarantine import Quarantine
from palingenesis.sft.data.rows import BadRow, Row
from palingenesis.sft.data.sources import Source, load_rows

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerBase

_ROWS_A_BATCH = 1000


@dataclass
class Account:
    """What became of the rows of one source.

    ``read`` is ``used`` plus ``skipped``. A row of plain text may give several samples. ``cut`` rows were
    longer than ``data.max_seq_length``; of ``reasoning_dropped`` rows the template leaves the reasoning out.
    """

    source: str
    read: int = 0
    used: int = 0
    skipped: int = 0
    cut: int = 0
    reasoning_dropped: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0

    def add(self, encoded: Encoded) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += len(encoded.input_ids)
        self.loss_tokens += encoded.loss_tokens
        self.cut += encoded.truncated
        self.reasoning_dropped += encoded.reasoning_dropped

    def told(self) -> str:
        """One line for the log."""
        parts = [f"{self.source}: {self.used} of {self.read} rows used, {self.samples} samples"]
        parts.append(f"{self.loss_tokens} of {self.tokens} tokens bear loss")
        if self.cut:
            parts.append(f"{self.cut} rows cut at data.max_seq_length")
        if self.reasoning_dropped:
            parts.append(f"{self.reasoning_dropped} rows have reasoning that the chat template leaves out")
        return ", ".join(parts)


@dataclass
class Prepared:
    """Samples of one source, with columns ``input_ids``, ``labels`` and ``row`` (its number in the file)."""

    dataset: Dataset
    account: Account


def samples_of(
    row: Row,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    masker: Masker | None,
    max_length: int | None,
) -> list[Encoded]:
    """The samples of one row; conversations need a ``masker``.

    Raises:
        BadRow: there are none.
    """
    if row.problem is not None:
        raise row.problem
    data = row.data or {}
    if masker is None:
        return _trainable(encode_text(tokenizer, text_of(data, source.messages_field), max_length))
    messages = normalize(data, source.messages_field)
    return _trainable([masker.encode(messages, tools=tools_of(data))])


def _trainable(samples: list[Encoded]) -> list[Encoded]:
    if not any(sample.loss_tokens for sample in samples):
        cut = any(sample.truncated for sample in samples)
        why = " after cutting at data.max_seq_length" if cut else ""
        raise BadRow("nothing_to_train", f"no token of the row bears loss{why}")
    return samples


def prepare(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    quarantine: Quarantine,
    *,
    options: MaskOptions,
    limit: int | None = None,
) -> Prepared:
    """Read, check and encode a source; rows that cannot be used go to ``quarantine``.

    ``limit`` is the most rows to use.

    Raises:
        ConfigError: there is no such source, none of its rows can be used, or the chat template is refused.
    """
    from datasets import Dataset

    masker = Masker(tokenizer, options) if source.mode == "sft" else None
    account = Account(source.title)

    def encoded() -> Iterator[tuple[Row, Encoded]]:
        for row in load_rows(source):
            if limit is not None and account.used >= limit:
                return
            account.read += 1
            try:
                samples = samples_of(row, source, tokenizer, masker, options.max_length)
            except BadRow as problem:
                account.skipped += 1
                quarantine.put(row, problem)
                continue
            account.used += 1
            for sample in samples:
                account.add(sample)
                yield row, sample

    table = _table(encoded())
    if not account.used:
        raise ConfigError(_nothing_left(source, account, quarantine))
    return Prepared(Dataset(table), account)


def _table(rows: Iterator[tuple[Row, Encoded]]) -> Any:
    """Samples as Arrow columns, a batch at a time: lists of Python's numbers take ten times the room."""
    import pyarrow as pa  # type: ignore[import-untyped]

    schema = pa.schema(
        [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("row", pa.int64())]
    )
    batches: list[Any] = []
    waiting: list[tuple[list[int], list[int], int]] = []

    def flush() -> None:
        columns = list(zip(*waiting, strict=True)) or [(), (), ()]
        arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, schema, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        waiting.clear()

    for row, sample in rows:
        waiting.append((sample.input_ids, sample.labels, row.number))
        if len(waiting) == _ROWS_A_BATCH:
            flush()
    flush()
    return pa.Table.from_batches(batches, schema=schema)


def _nothing_left(source: Source, account: Account, quarantine: Quarantine) -> str:
    if not account.read:
        return f"data.dataset: {source.dataset!r} holds no row"
    where = f"; all are in {quarantine.path}" if quarantine.path is not None else ""
    return (
        f"data.dataset: none of the {account.read} rows of {source.dataset!r} can be used, mostly because "
        f"({quarantine.example(source.title)}){where}"
    )


def join(parts: Sequence[Prepared]) -> Dataset:
    """The samples of all sources end to end, with a column ``source``; ``order`` gives indices into it."""
    from datasets import concatenate_datasets

    joined: Dataset = concatenate_datasets(
        [part.dataset.add_column("source", [part.account.source] * len(part.dataset)) for part in parts]
    )
    return joined


def mix(
    parts: Sequence[Prepared],
    weights: Sequence[float],
    *,
    seed: int,
    epoch: int = 0,
    length: int | None = None,
) -> Dataset:
    """The samples of one epoch, of all sources by weight, in order, with a column ``source``."""
    sizes = [len(part.dataset) for part in parts]
    rows = order(sizes, weights, seed=seed, epoch=epoch, length=length)
    mixed: Dataset = join(parts).select(rows)
    return mixed
