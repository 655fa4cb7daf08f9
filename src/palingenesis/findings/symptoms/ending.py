"""Symptoms of how a run went on and ended: skipped steps, errors, warnings that nothing else tells."""

from __future__ import annotations

import numpy as np

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.symptoms.machine import ran_out_of_memory

#: Warnings that the other symptoms tell of; the end of a run is told by itself.
_TOLD = frozenset(
    {
        "alarm",
        "bound_crossed",
        "gradient_spike",
        "incident",
        "log_error",
        "loss_spike",
        "no_gradients",
        "nonfinite",
        "not_optimized",
        "parameters_changed",
        "rank_outlier",
        "replica_divergence",
        "run_ended",
        "skipped_steps",
    }
)
_LONGEST = 200


def steps_skipped(case: Case) -> Finding | None:
    """Steps that mixed precision's gradient scaler, or a rule of the trainer, left out."""
    limits = case.limits
    told = case.events("skipped_steps")
    steps = sorted({event.step for event in case.events("skipped_step")})
    counted = case.series("train/skipped_steps")
    count = max(len(steps), int(counted.value[-1]) if counted else 0)
    last = max([*case.loss.step[-1:], *steps[-1:]], default=0)
    most = ""
    if (skips := case.source.skips) is not None:
        count, last, most = skips.steps, skips.of, "at most " if skips.at_most else ""
    share = min(count / last, 1.0) if last else 0.0
    if not told and not (count >= limits.skipped_least and share > limits.skipped):
        return None
    first = steps[0] if steps else told[0].step if told else int(counted.step[np.argmax(counted.value > 0)])
    layers = [str(layer) for event in told for layer in event.layers or []]
    where = f"; {layers[0]} overflowed first" if layers else ""
    return Finding(
        "run.steps_skipped",
        "critical" if share > 1 / 2 else "warning",
        f"{count} steps ({most}{share:.0%}) were skipped and taught the model nothing, the first at step "
        f"{first}{where}",
        {"skipped": count, "share": share, "steps": steps, "layers": layers},
        "model.torch_dtype: bfloat16, which needs no loss scale, in place of float16; "
        f"train.learning_rate: {case.rate(1 / 3, 'a third')} if gradients grow",
        since=first,
    )


def failed(case: Case) -> Finding | None:
    """An error ended the run, other than memory that ran out."""
    error = " ".join(case.source.error.split())
    if not error or ran_out_of_memory(error):
        return None
    last = int(case.loss.step[-1]) if case.loss else None
    after = "" if last is None else f" after step {last}"
    return Finding(
        "run.failed",
        "warning",
        f"an error ended the run{after}: {error[:_LONGEST]}",
        {"error": error[:_LONGEST], "last_step": last},
        "mend what the error names; train.resume_from: auto goes on from the newest whole checkpoint",
        since=last,
    )


def other_warnings(case: Case) -> Finding | None:
    """What rang in the record and is no part of another finding."""
    rang = {event.event for event in case.source.events if event.severity != "info"} - _TOLD
    found = [event for event in case.events(*rang) if event.severity != "info"]
    if not found:
        return None
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(
        "run.other_warnings",
        max((event.severity for event in found), key=("warning", "critical").index),
        f"step {first.step}: {' '.join(first.message.split())[:_LONGEST]}{more}",
        {"events": list(dict.fromkeys(event.event for event in found)), "steps": [e.step for e in found]},
        "pgs report shows each of them beside the curves of that step; docs/alarms.md says what each means",
        since=first.step,
    )
