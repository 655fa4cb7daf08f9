"""Many samples, checked on the batches that training would see: what ``pgs validate`` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.findings import Finding, Report
from palingenesis.preflight.checks.packing import check_isolation
from palingenesis.preflight.checks.setup import check_setup, read_model_facts
from palingenesis.preflight.samples import (
    UNREADABLE,
    Collate,
    Split,
    nothing_readable,
    rows_of,
    sources_of,
)
from palingenesis.preflight.tally import Tally
from palingenesis.preflight.target import tokenizer_of
from palingenesis.preflight.validate_facts import facts_of, padding_waste
from palingenesis.preflight.validate_findings import Judge, leaked, questions_known
from palingenesis.preflight.validate_work import (
    FINDING_OF,
    ROWS_A_PART,
    Examiner,
    Rows,
    examine_in_processes,
)
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import RefusedTemplate, Source
from palingenesis.sft.stream import read_for_evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Rows from which more than one process is worth starting: each takes seconds to import what it needs.
ROWS_FOR_PROCESSES = 4000
#: More processes than this wait for the one that reads.
MOST_PROCESSES = 8

Progress = Callable[[int], None]


def validate(
    config: TrainConfig,
    *,
    num_samples: int | None = 200,
    processes: int | None = None,
    progress: Progress | None = None,
    collate: Collate | None = None,
    model: Any = None,
) -> Report:
    """Check data, masks and tokenizer.

    Args:
        config: says what is trained, and on what.
        num_samples: rows to check, the first of every source by weight, and as many for evaluation; ``None``
            for all.
        processes: how many work at a time; by default as many as there are processors, where there are rows
            enough.
        progress: called with the number of rows that were checked since the last call.
        collate: a collator of your own, to be examined instead of training's; works in this process alone.
        model: a model to try packing on, instead of a small one of the same make.

    Raises:
        ConfigError: there is nothing to check: no tokenizer, no file, no row that can be read.
    """
    if num_samples is not None and num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples}: at least 1 is needed")
    tokenizer = tokenizer_of(config)
    facts = read_model_facts(config)
    try:
        tallies, end_of_turn, method = _tallies(config, tokenizer, num_samples, processes, progress, collate)
    except RefusedTemplate as refused:
        return Report("validate", (_refused(refused), *check_setup(config, tokenizer, facts, None)), {})
    findings = check_setup(config, tokenizer, facts, end_of_turn)
    pad_is_end = end_of_turn is not None and str(tokenizer.pad_token) in end_of_turn
    for split, tally in tallies.items():
        findings += Judge(config, tally, split, facts, pad_is_end, collate is not None).findings()
    if "eval" in tallies:
        findings += leaked(tallies["train"], tallies["eval"])
    if config.data.packing:
        findings += check_isolation(config, model=model, collate=collate)
    else:
        findings += padding_waste(config, tallies["train"])
    setup = {
        "answers_found_by": method,
        "end_of_turn": end_of_turn,
        "pad_is_end_of_turn": pad_is_end,
        "model_positions": facts.positions,
        "model_vocabulary": facts.vocabulary,
    }
    described: dict[str, Any] = {"setup": setup}
    for split, tally in tallies.items():
        described[split] = facts_of(config, tally, split)
    if "eval" in tallies:
        described["eval"]["questions_trained_on"] = questions_known(tallies["train"], tallies["eval"])
    return Report("validate", tuple(findings), described)


def _tallies(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int | None,
    processes: int | None,
    progress: Progress | None,
    collate: Collate | None,
) -> tuple[dict[Split, Tally], str | None, str]:
    """The counts of each split, what ends a turn, and how answers are found."""
    tallies: dict[Split, Tally] = {}
    end_of_turn, method = None, "plain text, all of it"
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        sources = sources_of(config, split)
        if not sources:
            continue
        examiner = Examiner(config, tokenizer, split, collate)
        if any(source.mode == "sft" for source in sources):
            masker = examiner.reader.require_masker()
            end_of_turn, method = masker.end_of_turn, masker.method
        most = num_samples
        if split == "eval" and config.data.eval_samples is not None:
            most = min(most or config.data.eval_samples, config.data.eval_samples)
        with read_for_evaluation(config) if split == "eval" else nullcontext():
            tallies[split] = _tally(examiner, _parts(rows_of(sources, most)), processes, progress)
            _require_something(tallies[split], sources)
    return tallies, end_of_turn, method


def _tally(
    examiner: Examiner,
    parts: Iterator[Rows],
    processes: int | None,
    progress: Progress | None,
) -> Tally:
    """Everything that is seen in some parts, in this process or, where they are many, in several."""
    wanted = processes if processes is not None else min(_processors(), MOST_PROCESSES)
    first = list(islice(parts, -(-ROWS_FOR_PROCESSES // ROWS_A_PART)))
    few = len(first) * ROWS_A_PART < ROWS_FOR_PROCESSES and processes is None
    alone = wanted < 2 or few or examiner.collate is not None

    def all_parts() -> Iterator[Rows]:
        while first:
            yield first.pop(0)
        yield from parts

    found = (
        map(examiner.examine, all_parts()) if alone else examine_in_processes(examiner, all_parts(), wanted)
    )
    whole = Tally()
    for tally in found:
        whole.join(tally)
        if progress is not None:
            progress(tally.rows.total())
    return whole


def _processors() -> int:
    """Those that this process may use, where the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _parts(rows: Iterator[Any]) -> Iterator[Rows]:
    while part := list(islice(rows, ROWS_A_PART)):
        yield part


def _refused(refused: RefusedTemplate) -> Finding:
    if refused.two_beginnings:
        return Finding(
            "tokenizer.double_bos",
            "critical",
            str(refused),
            {},
            "set model.chat_template to a copy of the template without the second bos_token",
        )
    return Finding(
        "masking.template_refused",
        "critical",
        str(refused),
        {},
        "set model.chat_template to a template with {% generation %} marks around answers",
    )


def _require_something(tally: Tally, sources: Sequence[Source]) -> None:
    """Refuse data of which no row could even be read: then there is nothing to say of it but that.

    What can be read and is left out for another reason makes findings.
    """
    unreadable = [FINDING_OF[kind] for kind in UNREADABLE]
    counts = {check: seen.count for check, seen in tally.seen.items() if check in unreadable}
    rows = tally.rows.total()
    if sum(counts.values()) < rows:
        return
    worst = tally.seen[max(counts, key=lambda check: counts[check])]
    likely = tally.proposals.most_common(1)
    example = f"line {worst.places[0][1]}: {worst.example}"
    raise nothing_readable(sources, rows, example, likely[0][0] if likely else "")
