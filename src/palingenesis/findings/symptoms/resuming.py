"""Symptoms of a resume that went wrong: data seen again, weights not those saved, rows in two versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from palingenesis.findings.case import LOSS, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import RecordedRow
from palingenesis.findings.symptoms.data import BATCH
from palingenesis.findings.trends import median, spread

_EPOCH = "train/epoch"


def _resumed_from(case: Case) -> list[int]:
    """The steps that the run was resumed from, without resumes that were undone by a later one."""
    return [
        int(event.from_step)
        for event in case.events("run_resumed")
        if isinstance(event.from_step, (int, float))
    ]


def data_after_resume(case: Case) -> Finding | None:
    """Batches that come again after a resume in the same epoch, or differ from those the steps had before."""
    resumed = _resumed_from(case)
    if not resumed:
        return None
    rows = [row for row in case.rows(f'"{BATCH}"') if isinstance(row.values.get(BATCH), str)]
    before = {row.step: str(row.values[BATCH]) for row in rows if not row.counts}
    counting = [row for row in rows if row.counts]
    changed = [row.step for row in counting if row.step in before and before[row.step] != row.values[BATCH]]
    repeated = list(_repeated(counting, resumed))
    if not changed and not repeated:
        return None
    told = []
    if repeated:
        told.append(
            f"{len(repeated)} batches after the resume had been trained on before it in the same epoch"
        )
    if changed:
        told.append(f"{len(changed)} steps that were run again got other batches than the first time")
    return Finding(
        "run.data_after_resume",
        "warning",
        f"{' and '.join(told)}: the data did not go on where it stopped",
        {"resumed_from": resumed, "repeated_steps": repeated, "changed_steps": changed},
        "train.resume_from: auto with the same data, train.seed and batch size as before; in a loop of "
        "your own save the position in the data with the checkpoint",
        since=min([*changed, *repeated]),
    )


def _repeated(rows: list[RecordedRow], resumed: list[int]) -> Iterator[int]:
    """Steps after a resume whose batch was seen before it, in the same pass over the data."""
    for from_step in resumed:
        earlier: dict[str, list[Any]] = {}
        for row in rows:
            batch, epoch = str(row.values[BATCH]), row.values.get(_EPOCH)
            if not isinstance(epoch, (int, float)):
                continue
            if row.step <= from_step:
                earlier.setdefault(batch, []).append(epoch)
            # A row's epoch is counted at its end: the whole first pass lies in (0, 1].
            elif any(np.ceil(epoch) == np.ceil(one) for one in earlier.get(batch, [])):
                yield row.step


def worse_after_resume(case: Case) -> Finding | None:
    """A loss that is higher after a resume than before: not the weights that were saved."""
    limits = case.limits
    for from_step in _resumed_from(case):
        before = _last(case, from_step)
        after = case.loss.part(from_step + 1).value[: limits.resume_window]
        if len(before) < limits.eval_after or len(after) < limits.eval_after:
            continue
        jump = float(np.median(after) - np.median(before))
        noise = float(np.hypot(spread(before) / len(before) ** 0.5, spread(after) / len(after) ** 0.5))
        # Above all that was before it, which a change of the data's order does not do.
        above = median(after, limits.alpha).low > before.max() if len(after) > limits.eval_after else False
        if jump > limits.resume_rise * abs(float(np.median(before))) and jump > 5 * noise and above:
            return Finding(
                "run.worse_after_resume",
                "critical",
                f"after the resume from step {from_step} the loss is {np.median(after):.4g} where it was "
                f"{np.median(before):.4g}: the weights or the optimizer are not the ones that were saved",
                {
                    "from_step": from_step,
                    "before": float(np.median(before)),
                    "after": float(np.median(after)),
                    "noise": noise,
                },
                "train.resume_from: another checkpoint; look whether the model ties its embedding and its "
                "head (tie_word_embeddings) and whether they are still one tensor after loading",
                since=from_step + 1,
            )
    return None


def _last(case: Case, step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return case.loss.part(-np.inf, step).value[-case.limits.resume_window :]


def tracker_rows(case: Case) -> Finding | None:
    """Rows that were written twice: a tracker has the first version, or none, of those steps."""
    if not _resumed_from(case) or not case.source.tracked:
        return None
    again = sorted({row.step for row in case.rows(f'"{LOSS}"') if not row.counts})
    if not again:
        return None
    return Finding(
        "run.tracker_rows",
        "info",
        f"steps {again[0]} to {again[-1]} were run again after a resume: trackers may show the first "
        "version of these rows, or miss some, the record has those that count",
        {"steps": again, "rows": len(again)},
        "judge by pgs report; pgs sync sends a tracker the rows that it lacks",
        since=again[0],
    )
