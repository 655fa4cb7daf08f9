"""Everything that can be checked before a run, together: what ``pgs diagnose`` does.

    masks and data   :mod:`palingenesis.preflight.validate`, over a few dozen rows
    memory           :mod:`palingenesis.preflight.memory`
    configuration    :mod:`palingenesis.preflight.sanity`, :mod:`palingenesis.preflight.sanity_model`
    tokenizer        :mod:`palingenesis.preflight.tokenizer_checks`
    first steps      :mod:`palingenesis.preflight.first_steps`, where a few real steps are wanted

What cannot be looked at is a finding: a check that was not made shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from palingenesis.errors import ConfigError, PalingenesisError
from palingenesis.findings import Finding, Report
from palingenesis.preflight.sanity import check_config, planned_steps
from palingenesis.preflight.sanity_known import Known
from palingenesis.preflight.target import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from palingenesis.preflight.samples import Split
    from palingenesis.preflight.sanity_model import Made
    from palingenesis.sft.config import TrainConfig

Mode = Literal["pre", "full"]
Result = TypeVar("Result")

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".txt")
#: Rows whose masks are checked.
SAMPLES = 50
#: Seconds in which rows are counted; a larger data set is left uncounted.
COUNT_SECONDS = 10.0
#: Seconds for finding what would make a run fit that does not.
SEARCH_SECONDS = 60.0


@dataclass
class _Gathered:
    """What the parts gave."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def part(self, name: str, make: Callable[[], Result]) -> Result | None:
        """What a part gives, or nothing where it cannot be made; then why is kept."""
        try:
            made = make()
        except PalingenesisError as error:
            self.failed[name] = str(error)
            return None
        self.checked.append(name)
        return made


def diagnose(
    config: TrainConfig,
    *,
    mode: Mode = "pre",
    gpu_bytes: int | None = None,
    world_size: int = 1,
    num_samples: int = SAMPLES,
) -> Report:
    """Check a run before it is started.

    Args:
        config: the run's.
        mode: ``pre`` looks, ``full`` does a few real steps as well.
        gpu_bytes: memory of the card; by default that of the device that is there, if there is one.
        world_size: processes that will train together.
        num_samples: rows whose masks are checked.

    Raises:
        ConfigError: there is no tokenizer, or none with a chat template, or a file that was named cannot be
            used.
    """
    gathered = _Gathered()
    with _quiet():
        tokenizer = tokenizer_of(config)  # without it neither masks nor data can be looked at
        made = gathered.part("model", lambda: _made(config))
        masks = gathered.part("masks and data", lambda: _validate(config, num_samples))
        _require_something(config, gathered, checked=made is not None or masks is not None)
        if masks is not None:
            gathered.findings += masks.findings
            gathered.facts["validate"] = masks.facts
        if made is not None:
            _look_at_model(config, made, tokenizer, gathered, gpu_bytes, world_size)
        known = _known(config, made, masks, world_size)
        gathered.findings += check_config(config, known)
        gathered.checked.append("configuration")
        gathered.left_out += known.unknown
        steps = planned_steps(config, known)
        if mode == "full":
            _first_steps(config, gathered, steps, world_size)
    return _report(gathered, mode, known, steps)


def _report(gathered: _Gathered, mode: Mode, known: Known, steps: int | None) -> Report:
    for why in dict.fromkeys(gathered.failed.values()):
        parts = [name for name, reason in gathered.failed.items() if reason == why]
        gathered.findings.append(_not_checked(parts, why))
    facts = {
        "mode": mode,
        "checked": gathered.checked,
        "not_checked": [*gathered.failed, *gathered.left_out],
        "parameters": known.parameters,
        "rows": known.rows,
        "world_size": known.world_size,
        "steps": steps,
        **gathered.facts,
    }
    seen: dict[tuple[str, str], Finding] = {}
    for finding in gathered.findings:  # two parts may come to the same conclusion
        seen.setdefault((finding.check, finding.message), finding)
    return Report("diagnose", tuple(seen.values()), facts)


def _not_checked(parts: list[str], why: str) -> Finding:
    return Finding(
        "config.not_checked",
        "warning",
        f"{', '.join(parts)}: could not be checked: {why}",
        {"parts": parts},
        "set what the message names, so that these parts can be checked too",
    )


def _require_something(config: TrainConfig, gathered: _Gathered, *, checked: bool) -> None:
    """Refuse what cannot be checked at all, and files that were named and cannot be used."""
    if not checked:
        raise ConfigError(_nothing(gathered.failed))
    data = config.data
    named = [data.dataset, data.eval_dataset, *(one.dataset for one in (*data.sources, *data.eval_sources))]
    why = gathered.failed.get("masks and data", "")
    if why.startswith("data.") and any(one and one in why and _is_path(one) for one in named):
        raise ConfigError(why)


def _is_path(name: str) -> bool:
    """Whether a name is meant as that of a file or folder, and not of something in the hub."""
    path = Path(name).expanduser()
    return path.exists() or name.startswith((".", "/", "~")) or path.suffix in _DATA_SUFFIXES


def _nothing(failed: dict[str, str]) -> str:
    """Why nothing can be checked, in one line; reasons that two parts share are told once."""
    reasons = list(dict.fromkeys(failed.values()))
    if all(why.startswith("model.name_or_path") for why in reasons):
        reasons = reasons[:1]
    return "; ".join(reasons)


# -- the parts ---------------------------------------------------------------------------------------------


def _made(config: TrainConfig) -> Made:
    from palingenesis.preflight.sanity_model import make_without_weights

    return make_without_weights(config)


def _validate(config: TrainConfig, num_samples: int) -> Report:
    from palingenesis.preflight.validate import validate

    return validate(config, num_samples=num_samples, processes=1)


def _look_at_model(
    config: TrainConfig,
    made: Made,
    tokenizer: PreTrainedTokenizerBase,
    gathered: _Gathered,
    gpu_bytes: int | None,
    world_size: int,
) -> None:
    """Memory, what is trained, tokenizer, disk."""
    from palingenesis.preflight.sanity_model import check_disk, check_rounding

    gathered.facts["model"] = {
        "class": made.name,
        "parameters": made.parameters,
        "trained": made.trained,
        "vocabulary": made.vocabulary,
    }
    gathered.findings += [
        *made.findings,
        *check_rounding(config),
        *check_disk(config, made, here=_card() is not None),
    ]
    gathered.findings += gathered.part("tokenizer", lambda: _tokenizer(config, tokenizer)) or []
    if config.data.packing and "masks and data" in gathered.failed:
        from palingenesis.preflight.checks.packing import check_isolation

        gathered.findings += check_isolation(config)  # else it is a part of what validate does
    memory = gathered.part("memory", lambda: _memory(config, gpu_bytes, world_size))
    if memory is not None:
        gathered.findings += memory.findings
        gathered.facts["memory"] = memory.facts
        if memory.facts["gpu_bytes"] is None:
            gathered.left_out.append(
                "whether it fits: there is no GPU, and neither --gpu nor --gpu_memory_gb"
            )


def _tokenizer(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    from palingenesis.preflight.memory.model import describe_model
    from palingenesis.preflight.tokenizer_checks import check_tokenizer

    return check_tokenizer(config, tokenizer, describe_model(config))


def _memory(config: TrainConfig, gpu_bytes: int | None, world_size: int) -> Report:
    from palingenesis.preflight.memory import estimate_memory
    from palingenesis.preflight.memory.changes import Budget, what_would_fit
    from palingenesis.preflight.memory.facts import facts_of
    from palingenesis.preflight.memory.findings import findings_of

    card = _card() if gpu_bytes is None else gpu_bytes
    fit = estimate_memory(config, world_size=world_size).on(card)
    budget = Budget(SEARCH_SECONDS)
    budget.took(fit.estimate.seconds)
    tried = what_would_fit(fit, budget) if fit.fits is False else []
    return Report("profile", findings_of(fit, tried), facts_of(fit, tried, not_tried=budget.left_out))


def _card() -> int | None:
    """Bytes of the device that is there."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _first_steps(config: TrainConfig, gathered: _Gathered, steps: int | None, world_size: int) -> None:
    from palingenesis.preflight.first_steps import first_steps

    try:
        outcome = gathered.part(
            "first steps", lambda: first_steps(config, steps=steps, world_size=world_size)
        )
    except Exception as error:  # noqa: BLE001 - whatever training raises is what is being looked for
        told = " ".join(str(error).split())[:300] or type(error).__name__
        gathered.findings.append(
            Finding(
                "first_step.failed",
                "critical",
                f"a step of training fails: {type(error).__name__}: {told}",
                {"error": type(error).__name__},
                "set what the error names; out of memory: lower train.per_device_batch_size or "
                "data.max_seq_length (see pgs profile)",
            )
        )
        return
    if outcome is not None:
        gathered.findings += outcome.findings
        gathered.facts["first_steps"] = outcome.facts
        gathered.left_out += outcome.not_checked


# -- what is known -----------------------------------------------------------------------------------------


def _known(config: TrainConfig, made: Made | None, masks: Report | None, world_size: int) -> Known:
    rows = eval_rows = None
    if masks is not None:
        rows, eval_rows = (_epoch_rows(config, masks, split) for split in ("train", "eval"))
    return Known(
        parameters=None if made is None else made.parameters,
        vocabulary=None if made is None else made.vocabulary or None,
        rows=rows,
        eval_rows=eval_rows,
        world_size=world_size,
    )


def _epoch_rows(config: TrainConfig, masks: Report, split: Split) -> int | None:
    """Rows that are used, from a count of all and the shares among those that were checked."""
    facts = masks.facts.get(split)
    counted = count_rows(config, split)
    if facts is None or not counted or not facts["rows"]:
        return None
    if split == "eval" and config.data.eval_samples is not None:
        sources = max(1, len(config.data.eval_sources))
        counted = min(counted, config.data.eval_samples * sources)
    used: float = counted * facts["samples"] / facts["rows"]
    if split == "train" and config.data.packing:
        used *= 1 - facts.get("batches", {}).get("packing", {}).get("rows_saved", 0.0)
    return max(1, round(used))


def count_rows(config: TrainConfig, split: Split, seconds: float = COUNT_SECONDS) -> int | None:
    """Rows of all sources of a split, or nothing where counting them takes longer than there is."""
    from palingenesis.preflight.samples import rows_of, sources_of

    sources = sources_of(config, split)
    if not sources:
        return None
    end = time.monotonic() + seconds
    count = 0
    for _ in rows_of(sources, None):
        count += 1
        if count % 1000 == 0 and time.monotonic() > end:
            return None
    return count


# -- after the run -----------------------------------------------------------------------------------------


def diagnose_log(source: str | Path) -> Report:
    """What the record of a run, or any trainer's log, shows.

    Args:
        source: a run folder, a log, or ``-`` for stdin.

    Raises:
        RecordError: a run folder that cannot be read.
        RunLogError: nothing that can be read as a log.
    """
    from palingenesis.findings.whole import report_on

    report = report_on("diagnose", source)
    return Report(report.command, report.findings, {"mode": "post", **report.facts})


@contextmanager
def _quiet() -> Iterator[None]:
    """Other libraries' bars and remarks are no part of the answer."""
    from palingenesis.preflight.memory.quiet import quiet
    from palingenesis.sft.quiet import quiet_libraries

    with quiet(), quiet_libraries():
        yield
