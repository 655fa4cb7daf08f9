"""From rows to counts: what one process does with a part of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from palingenesis.preflight.checks.documents import DocumentChecks
from palingenesis.preflight.checks.text import control_characters, mojibake, script_of
from palingenesis.preflight.samples import (
    Collate,
    Reader,
    Refused,
    Sample,
    Split,
    batches,
)
from palingenesis.preflight.tally import Tally
from palingenesis.sft.data import Row, Source
from palingenesis.sft.data.rows import Kind
from palingenesis.sft.stream import mask_options

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig

Rows = Sequence[tuple[Source, Row]]

#: Rows that are handed to a process at a time, and packed together.
ROWS_A_PART = 256

#: The finding that a row which training leaves out counts under.
FINDING_OF: dict[Kind, str] = {
    "broken_json": "data.broken_json",
    "missing_field": "data.missing_field",
    "bad_value": "data.bad_value",
    "role_order": "data.role_order",
    "empty_answer": "data.empty_answer",
    "control_token": "data.control_token",
    "template": "masking.rows_refused",
    "nothing_to_train": "masking.no_loss_tokens",
}
_HASH_BYTES = 8


@dataclass
class Examiner:
    """Examines parts of one split."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    split: Split
    collate: Collate | None = None
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.tokenizer, mask_options(self.config))

    def examine(self, rows: Rows) -> Tally:
        """Everything that is seen in some rows."""
        tally = Tally()
        checks = DocumentChecks(self.reader, tally)
        samples = list(self._samples(rows, tally))
        packed = self.config.data.packing and self.split == "train"
        for batch in batches(samples, self.config, self.tokenizer, packed=packed, collate=self.collate):
            checks.check(batch)
        return tally

    def _samples(self, rows: Rows, tally: Tally) -> Iterator[Sample]:
        for source, row in rows:
            tally.rows[row.source] += 1
            found = self.reader.read(source, row)
            if isinstance(found, Refused):
                count_refused(found, tally)
                continue
            tally.used[row.source] += 1
            for sample in found:
                _count(sample, tally)
                yield sample


def count_refused(row: Refused, tally: Tally) -> None:
    """Count a row that training leaves out under the finding that it makes."""
    tally.note(FINDING_OF[row.problem.kind], row.source, row.line, row.problem.reason)
    if row.problem.kind == "missing_field":
        tally.fields.update(row.fields)
        if row.proposal:
            tally.proposals[row.proposal] += 1
    if row.lost is not None:
        tally.lost[row.lost] += 1
    if row.lost == "truncation":
        tally.note_cut(row.source, row.line, row.whole)


def _count(sample: Sample, tally: Tally) -> None:
    encoded, origin = sample.encoded, sample.encoded.origin
    ids = np.asarray(encoded.input_ids, dtype=np.int32)
    tally.source.append(tally.index_of(sample.source))
    tally.line.append(sample.line)
    tally.length.append(len(ids))
    tally.whole.append(len(ids) if origin is None else len(origin.offsets))
    tally.loss.append(encoded.loss_tokens)
    tally.content.append(_hash(ids.tobytes()))
    if origin is not None and encoded.truncated:
        end = origin.offsets[len(ids) - 1][1]
        if any(span.end > end for span in origin.spans):
            tally.note_cut(sample.source, sample.line, len(origin.offsets))
    tally.reasoning_dropped += encoded.reasoning_dropped
    written = [message.content for message in sample.messages]
    asked = "\0".join(written[:-1])
    tally.prompt.append(_hash(asked.encode("utf-8", "surrogatepass")) if asked else 0)
    tally.script.append(script_of("\n".join(written) or sample.written))
    for check, look in (("data.mojibake", mojibake), ("data.control_characters", control_characters)):
        if piece := look(sample.written):
            tally.note(check, sample.source, sample.line, piece)


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest(), "little")


# -- several processes -------------------------------------------------------------------------------------

_examiner: Examiner | None = None


def start(examiner: Examiner) -> None:
    """Make a process ready for :func:`examine_part`."""
    global _examiner
    _examiner = examiner


def examine_part(rows: Rows) -> Tally:
    """What a process does with a part of the rows."""
    assert _examiner is not None, "the process was not started with an examiner"
    return _examiner.examine(rows)


def examine_in_processes(examiner: Examiner, parts: Iterator[Rows], processes: int) -> Iterator[Tally]:
    """The counts of every part, in the order of the parts; only a few parts are in memory at a time."""
    from collections import deque
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Not forked: this process has threads, of the tokenizer and of torch, which a fork leaves half alive.
    pool: ProcessPoolExecutor
    with ProcessPoolExecutor(processes, get_context("spawn"), start, (examiner,)) as pool:
        waiting: deque[Future[Tally]] = deque()
        try:
            for part in parts:
                waiting.append(pool.submit(examine_part, part))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()
