"""Two or more runs side by side: what each came to, what they were told differently, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palingenesis.findings.finding import Finding, Report
from palingenesis.findings.render import to_json as findings_document
from palingenesis.record.format import encodable
from palingenesis.report.options import flat, option_value
from palingenesis.report.parting import Apart, Parting, parting_of
from palingenesis.report.subject import Subject
from palingenesis.report.words import number, step_number, visible
from palingenesis.runlogs.table import Column

LETTERS = "ABCDEF"
#: More runs would need more looks than eyes can tell apart.
MOST_RUNS = len(LETTERS)

_ABSENT = object()
_UNKNOWN = "–"
#: A last value is the median of so many of the last ones.
_LAST = 10


@dataclass(frozen=True)
class Setting:
    """A setting in which runs differ."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """What is said of several runs."""

    subjects: tuple[Subject, ...]
    partings: tuple[Parting, ...]
    """Of each run but the first, from the first."""
    settings: tuple[Setting, ...]
    settings_same: int

    def letter(self, subject: int) -> str:
        """What a run is called on the page: names may be long, and alike."""
        return LETTERS[subject]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for subject in self.subjects for finding in subject.findings)


def compare(subjects: Sequence[Subject]) -> Comparison:
    """Compare runs with the first of them."""
    settings, same = settings_that_differ([subject.settings for subject in subjects])
    return Comparison(
        subjects=tuple(subjects),
        partings=tuple(parting_of(subjects[0], other) for other in subjects[1:]),
        settings=settings,
        settings_same=same,
    )


def settings_that_differ(configs: Sequence[Mapping[str, Any]]) -> tuple[tuple[Setting, ...], int]:
    """Settings that are not the same in all runs, and how many are."""
    tables = [flat(config) for config in configs]
    names = dict.fromkeys(name for table in tables for name in table)
    differ, same = [], 0
    for name in names:
        values = [table.get(name, _ABSENT) for table in tables]
        if all(value == values[0] for value in values):
            same += 1
        else:
            shown = tuple(_UNKNOWN if value is _ABSENT else option_value(value) for value in values)
            differ.append(Setting(visible(name), shown))
    return _without_repeats(_of_one_loop(differ)), same


def _of_one_loop(settings: list[Setting]) -> list[Setting]:
    """Between two kinds of loops: the own options that only one of them has say nothing of a difference."""
    if all(setting.name != "training.by" for setting in settings):
        return settings
    return [
        setting
        for setting in settings
        if ".options." not in setting.name or len(set(setting.values) - {_UNKNOWN}) > 1
    ]


def _without_repeats(settings: list[Setting]) -> tuple[Setting, ...]:
    """A loop's own name for a setting is left out where the common one says the same."""
    common = {
        (setting.name.rpartition(".")[2], setting.values)
        for setting in settings
        if ".options." not in setting.name
    }
    return tuple(
        setting
        for setting in settings
        if ".options." not in setting.name or (setting.name.rpartition(".")[2], setting.values) not in common
    )


# -- figures of each run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a run came to, as numbers; None where they are not known."""

    last_step: int | None
    loss: float | None
    """Median of the last values: one alone is noise."""
    best_eval: float | None
    best_eval_step: int | None
    peak_rate: float | None
    tokens: float | None
    tokens_per_second: float | None


def figures_of(subject: Subject) -> Figures:
    signals = subject.signals
    evaluation, rate = signals.numbers("eval/loss"), signals.numbers("train/lr")
    speed = signals.numbers("train/tokens_per_sec_global") or signals.numbers("train/tokens_per_sec")
    tokens = signals.numbers("train/tokens_total_all") or signals.numbers("train/tokens_total")
    best = int(evaluation.value.argmin()) if evaluation else None
    return Figures(
        last_step=_last_step(signals),
        loss=_last(signals.numbers("train/ce_loss") or signals.numbers("train/loss")),
        best_eval=None if best is None else float(evaluation.value[best]),
        best_eval_step=None if best is None else int(evaluation.step[best]),
        peak_rate=float(rate.value.max()) if rate else None,
        tokens=float(tokens.value.max()) if tokens else None,
        tokens_per_second=float(np.median(speed.value)) if speed else None,
    )


def _last(column: Column) -> float | None:
    return float(np.median(column.value[-_LAST:])) if column else None


def _last_step(signals: Mapping[str, Column]) -> int | None:
    steps = [float(signals[name].step[-1]) for name in signals if signals[name]]
    return int(max(steps)) if steps else None


# -- sentences -----------------------------------------------------------------------------------------------


def tell_parting(parting: Parting, letter: str, first: str = LETTERS[0]) -> list[str]:
    """Where a run parts from the first, in sentences."""
    told = []
    step = parting.first_step
    if step is None and not parting.same:
        told.append(f"{letter} and {first} have no number of the same step in common.")
    elif step is None:
        told.append(
            f"At every step that both have, {letter} is the same as {first} in every number that both have."
        )
    elif parting.batches is not None and parting.batches <= step:
        told.append(f"From step {step_number(step)} on {letter} trained on other batches than {first}.")
    else:
        told.append(_first_in_words(parting, letter, first))
    if parting.batches is None and parting.batches_compared:
        told.append(f"The batches are the same at all {parting.batches_compared:,} common steps.")
    for what, side in (("training loss", parting.loss), ("evaluation loss", parting.evaluation)):
        if side is not None:
            told.append(_apart_in_words(side, what, letter, first))
    if parting.loss is None:
        told.append(
            f"They have fewer than {parting.limits.least_steps} steps in common at which both have a loss: "
            "too few to say whether their losses stay apart."
        )
    return told


def _first_in_words(parting: Parting, letter: str, first: str) -> str:
    at = parting.differences[0].step
    names = [one.signal for one in parting.differences if one.step == at]
    shown = ", ".join(visible(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{letter} first differs from {first} at step {step_number(at)}: {shown}{more}."


_NAMED = 4


def _apart_in_words(side: Apart, what: str, letter: str, first: str) -> str:
    interval = f"{number(side.difference, 3)} (95%: {number(side.low, 3)} to {number(side.high, 3)})"
    if side.step is None:
        return f"Their {what} does not stay apart: {letter} less {first} is {interval} at the end."
    which = "lower" if side.lower else "higher"
    since = step_number(side.step)
    return f"The {what} of {letter} is {which} from about step {since} on: {interval} at the end."


# -- data ----------------------------------------------------------------------------------------------------


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as strict JSON can hold it."""
    document = {
        "runs": [
            {
                "letter": comparison.letter(place),
                "name": subject.name,
                "place": subject.place,
                "format": subject.format,
                "verdict": subject.verdict,
                "sentence": subject.sentence,
                **vars(figures_of(subject)),
                "findings": findings_document(Report("report", subject.findings))["findings"],
            }
            for place, subject in enumerate(comparison.subjects)
        ],
        "parting": [
            {
                "run": comparison.letter(place),
                "from": comparison.letter(0),
                "first_step": parting.first_step,
                "batches": parting.batches,
                "differences": [vars(one) for one in parting.differences],
                "same": list(parting.same),
                "loss": None if parting.loss is None else vars(parting.loss),
                "eval_loss": None if parting.evaluation is None else vars(parting.evaluation),
                "sentences": tell_parting(parting, comparison.letter(place)),
            }
            for place, parting in enumerate(comparison.partings, 1)
        ],
        "settings": {setting.name: list(setting.values) for setting in comparison.settings},
        "settings_same": comparison.settings_same,
    }
    return {key: encodable(value) for key, value in document.items()}
