"""A few samples as the model will be trained on them, token by token: what ``pgs inspect`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from palingenesis.errors import ConfigError
from palingenesis.findings import Finding, Report
from palingenesis.preflight.checks.setup import read_model_facts
from palingenesis.preflight.samples import (
    UNREADABLE,
    Reader,
    Refused,
    Sample,
    Split,
    batches,
    nothing_readable,
    rows_of,
    sources_of,
)
from palingenesis.preflight.tally import Tally
from palingenesis.preflight.target import tokenizer_of
from palingenesis.preflight.tokens import Token, tokens_of
from palingenesis.preflight.validate_findings import Judge
from palingenesis.preflight.validate_work import count_refused
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.stream import mask_options, read_for_evaluation

#: How many samples are read for each packed row that is shown, so that rows are as full as in training.
_SAMPLES_A_ROW = 32


@dataclass(frozen=True)
class Shown:
    """One row of training: a sample, or several packed ones.

    ``places`` names file and line of each document.
    """

    title: str
    places: tuple[str, ...]
    tokens: tuple[Token, ...]
    truncated: bool

    @property
    def loss_tokens(self) -> int:
        """How many of the tokens bear loss."""
        return sum(token.loss for token in self.tokens)


@dataclass(frozen=True)
class Inspection:
    """What was looked at. ``method``: how answers are found, or that all of a plain text is trained.

    ``findings`` are made of the rows that training leaves out, as ``pgs validate`` makes them.
    """

    model: str
    method: str
    packed: bool
    shown: tuple[Shown, ...]
    refused: tuple[Refused, ...]
    findings: tuple[Finding, ...] = ()


def inspect(
    config: TrainConfig, *, num_samples: int = 5, indices: Sequence[int] = (), split: Split = "train"
) -> Inspection:
    """The first rows of training data, or those with the numbers ``indices`` (the line of a ``.jsonl`` file).

    Raises:
        ConfigError: the data or the tokenizer cannot be used, or there is no row of a number.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples}: at least 1 is needed")
    tokenizer = tokenizer_of(config)
    reader = Reader(tokenizer, mask_options(config))
    packed = config.data.packing and not indices and split == "train"
    wanted = num_samples * (_SAMPLES_A_ROW if packed else 1)
    with read_for_evaluation(config) if split == "eval" else nullcontext():
        samples, refused, tally = _chosen(config, reader, wanted, indices, split)
    shown = []
    for batch in batches(samples, config, tokenizer, size=1, packed=packed):
        tokens: list[Token] = []
        for number, document in enumerate(batch.rows[0], start=1):
            tokens += tokens_of(document, reader, number=number, start=len(tokens))
        held = [document.sample for document in batch.rows[0]]
        shown.append(_shown(held, tokens))
        if len(shown) == num_samples and not indices:
            break
    masker = reader.masker
    return Inspection(
        model=config.model.name_or_path,
        method="plain text, all of it" if masker is None else masker.method,
        packed=packed,
        shown=tuple(shown),
        refused=tuple(refused),
        findings=tuple(Judge(config, tally, split, read_model_facts(config)).seen()) if refused else (),
    )


def _chosen(
    config: TrainConfig, reader: Reader, most: int, indices: Sequence[int], split: Split
) -> tuple[list[Sample], list[Refused], Tally]:
    sources = sources_of(config, split)
    if not sources:
        raise ConfigError("there is no evaluation data: set data.eval_dataset")
    samples: list[Sample] = []
    refused: list[Refused] = []
    tally = Tally()
    missing = set(indices)
    for source, row in rows_of(sources, None if indices else most):
        if indices and row.number not in indices:
            if row.number > max(indices) and len(sources) == 1:
                break
            continue
        missing.discard(row.number)
        tally.rows[row.source] += 1
        found = reader.read(source, row)
        if isinstance(found, Refused):
            refused.append(found)
            count_refused(found, tally)
        else:
            samples += found
    if refused and not samples and not indices and all(r.problem.kind in UNREADABLE for r in refused):
        example = f"line {refused[0].line}: {refused[0].problem.reason}"
        raise nothing_readable(sources, len(refused), example, refused[0].proposal)
    if missing:
        told = ", ".join(map(str, sorted(missing)))
        raise ConfigError(f"there is no row {told} in {' or '.join(repr(each.dataset) for each in sources)}")
    return samples, refused, tally


def _shown(held: Sequence[Sample], tokens: Sequence[Token]) -> Shown:
    places = tuple(f"{sample.file} line {sample.line}" for sample in held)
    title = held[0].source if len(held) == 1 else f"{len(held)} documents packed"
    return Shown(title, places, tuple(tokens), any(sample.encoded.truncated for sample in held))


def as_report(found: Inspection) -> Report:
    """The inspection as every command's findings are told; the facts hold every token by its fields."""
    return Report("inspect", found.findings, _facts(found))


def _facts(found: Inspection) -> dict[str, Any]:
    return {
        "model": found.model,
        "method": found.method,
        "packed": found.packed,
        "samples": [
            {
                "source": shown.title,
                "places": list(shown.places),
                "truncated": shown.truncated,
                "tokens": len(shown.tokens),
                "loss_tokens": shown.loss_tokens,
                "table": [
                    {
                        "position": token.position,
                        "token": token.piece,
                        "text": token.text,
                        "id": token.id,
                        "role": token.role,
                        "turn": token.turn or None,
                        "loss": token.loss,
                        "special": token.special,
                        "document": token.document,
                        "position_id": token.position_id,
                        "note": token.note,
                    }
                    for token in shown.tokens
                ],
            }
            for shown in found.shown
        ],
        "refused": [
            {
                "source": each.source,
                "file": each.file,
                "line": each.line,
                "kind": each.problem.kind,
                "reason": each.problem.reason,
            }
            for each in found.refused
        ],
    }
