"""The samples that training would see, each with where it comes from, and the batches made of them.

Reading, masking, packing and collating are those of :mod:`palingenesis.sft.data`; what is added here is which
row of which file every document of a batch was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from palingenesis.errors import ConfigError
from palingenesis.sft.data import (
    BadRow,
    Encoded,
    Masker,
    MaskOptions,
    Message,
    Row,
    Source,
    collator,
    load_rows,
    normalize,
    pack,
    samples_of,
    text_of,
)
from palingenesis.sft.data.messages import MESSAGE_FIELDS
from palingenesis.sft.data.mixture import shares
from palingenesis.sft.data.rows import Kind
from palingenesis.sft.stream import evaluation_sources, training_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig

Split = Literal["train", "eval"]
Collate = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
#: Where the loss of a row that has none was lost.
Lost = Literal["truncation", "weights", "turns"]
#: Why a row cannot even be read; what can be read and is left out for another reason is still looked at.
UNREADABLE: tuple[Kind, ...] = ("broken_json", "missing_field", "bad_value")
#: What an object that is a message has one of.
_TURN_FIELDS = {"role", "from", "content", "value"}
#: Names that other tools give to a question and to its answer.
_QUESTIONS = ("instruction", "question", "query", "input", "user", "prompt", "problem")
_ANSWERS = ("output", "response", "answer", "assistant", "chosen", "completion", "solution")


@dataclass(frozen=True)
class Sample:
    """One sample: a conversation, or (without ``messages``) a part of a plain text.

    ``written`` is its text; of the parts of a plain text the first has all of it.
    """

    source: str
    file: str
    line: int
    encoded: Encoded
    messages: tuple[Message, ...] = ()
    tools: list[Any] | None = None
    written: str = ""


@dataclass(frozen=True)
class Refused:
    """A row that training leaves out.

    ``fields`` are the names it has, ``proposal`` what would make it one that can be used, ``whole`` its
    tokens before it was cut, if that took its answers.
    """

    source: str
    file: str
    line: int
    problem: BadRow
    fields: tuple[str, ...] = ()
    lost: Lost | None = None
    proposal: str = ""
    whole: int = 0


@dataclass(frozen=True)
class Document:
    """One sample as it stands in a batch."""

    sample: Sample
    ids: NDArray[Any]
    labels: NDArray[Any]
    positions: NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """A collated batch: ``tensors`` is what the model gets, ``rows`` the documents of each of its rows."""

    tensors: Mapping[str, Any]
    rows: tuple[tuple[Document, ...], ...]
    packed: bool

    @property
    def documents(self) -> Iterator[Document]:
        """All of them."""
        return (document for row in self.rows for document in row)


@dataclass
class Reader:
    """Makes samples of rows as training does.

    Raises:
        ConfigError: the chat template is refused.
    """

    tokenizer: PreTrainedTokenizerBase
    options: MaskOptions
    masker: Masker | None = field(init=False, default=None)

    def require_masker(self) -> Masker:
        """The masker of conversations."""
        if self.masker is None:
            self.masker = Masker(self.tokenizer, self.options)
        return self.masker

    def read(self, source: Source, row: Row) -> list[Sample] | Refused:
        """The samples of a row, or why there are none."""
        masker = self.require_masker() if source.mode == "sft" else None
        data: Mapping[str, Any] = row.data or {}
        try:
            found = samples_of(row, source, self.tokenizer, masker, self.options.max_length)
        except BadRow as problem:
            lost = self._lost(source, data) if problem.kind == "nothing_to_train" else None
            proposal = propose(source, data) if problem.kind == "missing_field" else ""
            whole = self._whole(source, row) if lost == "truncation" else 0
            return Refused(
                row.source, row.file, row.number, problem, tuple(map(str, data)), lost, proposal, whole
            )
        if masker is None:
            texts = [text_of(data, source.messages_field), *[""] * (len(found) - 1)]
            return [
                Sample(row.source, row.file, row.number, each, written=text)
                for each, text in zip(found, texts, strict=True)
            ]
        return [
            Sample(
                row.source,
                row.file,
                row.number,
                each,
                tuple(each.origin.messages),
                each.origin.tools,
                each.origin.text,
            )
            for each in found
            if each.origin is not None
        ]

    def _whole(self, source: Source, row: Row) -> int:
        """Tokens of a row that is not cut."""
        uncut = Reader(self.tokenizer, replace(self.options, max_length=None)).read(source, row)
        return 0 if isinstance(uncut, Refused) else max(len(one.encoded.input_ids) for one in uncut)

    def _lost(self, source: Source, data: Mapping[str, Any]) -> Lost:
        messages = normalize(data, source.messages_field)
        if wanted_messages(messages, self.options):
            return "truncation"
        answers = [message for message in messages if message.role == "assistant"]
        return "turns" if any(answer.trained for answer in answers) else "weights"


def propose(source: Source, data: Mapping[str, Any]) -> str:
    """What would give messages (or text) to a row in which they are not where they are looked for."""
    option = "set data.messages_field to"
    if source.mode == "pretrain":
        texts = [name for name, value in data.items() if isinstance(value, str) and value.strip()]
        longest = max(texts, key=lambda name: len(data[name]), default=None)
        return f"{option} {longest}" if longest else ""
    for name, value in data.items():
        entries = value if isinstance(value, list) and value else [None]
        if all(isinstance(each, Mapping) and _TURN_FIELDS & set(each) for each in entries):
            return f"{option} {name}"
    for asked, answered in product(_QUESTIONS, _ANSWERS):
        if asked in data and answered in data:
            return f"rename the field {asked} to prompt and {answered} to completion"
    for name in map(str, data):
        if name in MESSAGE_FIELDS:
            continue  # it is there, and holds nothing
        if near := get_close_matches(name.lower(), MESSAGE_FIELDS, n=1):
            return f"rename the field {name} to {near[0]}"
    if isinstance(data.get("text"), str):
        return "for plain text list the file under data.sources with mode: pretrain"
    return ""


def wanted_messages(messages: Sequence[Message], options: MaskOptions) -> list[int]:
    """Which messages the options say are trained, found without regard to any text."""
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=0)
    first = last_user if options.last_turn_only else 0
    roles = {"assistant", "tool"} if options.include_observations else {"assistant"}
    return [
        at
        for at, message in enumerate(messages)
        if at >= first
        and message.trained
        and message.role in roles
        # A tool that returned nothing leaves nothing to train.
        and (message.role == "assistant" or message.content.strip())
    ]


def sources_of(config: TrainConfig, split: Split) -> list[Source]:
    """What is trained on, or evaluated on."""
    return training_sources(config) if split == "train" else evaluation_sources(config)


def rows_of(sources: Sequence[Source], most: int | None) -> Iterator[tuple[Source, Row]]:
    """The first ``most`` rows, of each source its share by weight; all of them for ``None``.

    Raises:
        ConfigError: a source cannot be read, or holds no row.
    """
    counts: Sequence[int | None] = [None] * len(sources)
    if most is not None and sources:
        # No source is passed over: what is wrong with it would not be seen.
        counts = [max(1, count) for count in shares([source.weight for source in sources], most)]
    for source, count in zip(sources, counts, strict=True):
        empty = True
        for row in islice(load_rows(source), count):
            empty = False
            yield source, row
        if empty:
            raise ConfigError(f"data.dataset: {source.dataset!r} holds no row")


def nothing_readable(sources: Sequence[Source], count: int, example: str, proposal: str) -> ConfigError:
    """What is said of data of which no row can be read; ``example`` is of one of them."""
    named = " and ".join(repr(source.dataset) for source in sources)
    told = f"none of the {count} rows of {named}" if count > 1 else f"the one row of {named}"
    can = "can be read" if count > 1 else "cannot be read"
    return ConfigError(f"data.dataset: {told} {can}; {example}" + (f"; {proposal}" if proposal else ""))


def batches(
    samples: Sequence[Sample],
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    size: int | None = None,
    packed: bool | None = None,
    collate: Collate | None = None,
) -> Iterator[Batch]:
    """Samples packed where the configuration says so, collated as in training, with their origin.

    Args:
        samples: in the order in which they are put together.
        config: says how many rows a batch has and whether they are packed.
        tokenizer: says what pads.
        size: rows of a batch, other than ``config`` says.
        packed: whether rows are packed, other than ``config`` says: evaluation never is.
        collate: another collator, to be examined instead of training's.
    """
    size = size or config.train.per_device_batch_size
    packed = config.data.packing if packed is None else packed
    pad = tokenizer.pad_token_id
    made = collator(int(pad) if isinstance(pad, int) else 0, packed=packed)
    groups = _packed(samples, config) if packed else [[sample] for sample in samples]
    for start in range(0, len(groups), size):
        chosen = groups[start : start + size]
        rows = [_row(group, packed=packed) for group in chosen]
        tensors = made(rows) if collate is None else _by_own(collate, rows)
        yield Batch(tensors, _documents(tensors, chosen), packed)


def _by_own(collate: Collate, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What a collator of somebody's own makes of rows: with labels, or without where it takes none.

    Raises:
        ConfigError: it fails, or its batches are none.
    """
    try:
        tensors = collate(rows)
    except Exception as error:  # noqa: BLE001 - any code; those that make labels themselves fail on given ones
        try:
            tensors = collate([{"input_ids": row["input_ids"].tolist()} for row in rows])
        except Exception:  # noqa: BLE001 - the first reason is the one to tell
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"the collator that was given fails ({told}): it is called with a list of rows, each with "
                "input_ids and labels, or with input_ids alone"
            ) from error
    shapes = [getattr(tensors.get(name), "shape", ()) for name in ("input_ids", "labels")] if tensors else []
    if not shapes or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        told = " and ".join(str(tuple(shape)) for shape in shapes) or "nothing"
        raise ConfigError(
            f"the collator that was given returned {told}: it is to return input_ids and labels, two "
            "tensors of one shape, rows by positions"
        )
    return tensors


def _row(group: Sequence[Sample], *, packed: bool) -> dict[str, Any]:
    # Arrays, of which collators make tensors several times as fast as of lists.
    row: dict[str, Any] = {
        "input_ids": np.concatenate([np.asarray(sample.encoded.input_ids) for sample in group]),
        "labels": np.concatenate([np.asarray(sample.encoded.labels) for sample in group]),
    }
    return row | {"seq_lengths": [len(sample.encoded.input_ids) for sample in group]} if packed else row


def _packed(samples: Sequence[Sample], config: TrainConfig) -> list[list[Sample]]:
    """Which samples training's packing puts together."""
    from datasets import Dataset  # type: ignore[import-untyped]

    length = config.data.max_seq_length
    if length is None:
        raise ConfigError("data.packing needs a length to pack to: set data.max_seq_length")
    if not samples:
        return []
    columns = {
        "input_ids": [sample.encoded.input_ids for sample in samples],
        "labels": [sample.encoded.labels for sample in samples],
    }
    # Packing keeps no other column; equal documents are as good as each other.
    waiting: dict[bytes, list[Sample]] = defaultdict(list)
    for sample in reversed(samples):
        waiting[_key(sample.encoded.input_ids, sample.encoded.labels)].append(sample)
    groups = []
    for row in pack(Dataset.from_dict(columns), length):
        group, start = [], 0
        for count in row["seq_lengths"]:
            end = start + count
            group.append(waiting[_key(row["input_ids"][start:end], row["labels"][start:end])].pop())
            start = end
        groups.append(group)
    return groups


def _key(ids: Sequence[int], labels: Sequence[int]) -> bytes:
    return np.asarray([*ids, *labels], dtype=np.int32).tobytes()


def _documents(
    tensors: Mapping[str, Any], groups: Sequence[Sequence[Sample]]
) -> tuple[tuple[Document, ...], ...]:
    """Where the samples lie in a batch: row by row, or all end to end where there is one row for all."""
    ids, labels = tensors["input_ids"].numpy(), tensors["labels"].numpy()
    given = tensors.get("position_ids")
    positions = None if given is None else given.numpy()
    mask = tensors.get("attention_mask")
    # A mask that is no table of ones and zeros belongs to a kernel and says nothing of padding.
    padding = mask.numpy() if mask is not None and tuple(mask.shape) == ids.shape else None
    flat = len(ids) == 1 and (len(groups) > 1 or len(groups[0]) > 1)
    found: list[tuple[Document, ...]] = []
    start = 0
    for number, group in enumerate(groups):
        at = 0 if flat else number
        if not flat:
            start = 0 if padding is None else int(np.argmax(padding[at] != 0))
        row = []
        for sample in group:
            end = start + len(sample.encoded.input_ids)
            here = np.arange(end - start) if positions is None else positions[at, start:end]
            row.append(Document(sample, ids[at, start:end], labels[at, start:end], here))
            start = end
        found.append(tuple(row))
    return tuple(found)
