"""The findings of a status: what is wrong with a run that goes on, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from palingenesis.findings.finding import Finding
from palingenesis.findings.status.events import Message, NonFinite, Skipped, crash_loop, known
from palingenesis.findings.status.limits import StatusLimits
from palingenesis.findings.status.loss import LossNow, Setback, diverging
from palingenesis.findings.status.pace import Silence, Speed
from palingenesis.findings.status.words import number, span, step_in_words
from palingenesis.record.reader import Run
from palingenesis.record.verdict import CRITICAL, NOT_MONITORED, PARTLY_MONITORED
from palingenesis.runlogs.table import RunLog


@dataclass(frozen=True)
class Seen:
    """All that a status has seen, for findings to be made of."""

    log: RunLog
    limits: StatusLimits
    over: bool
    """The run has ended as it should, or has reached its last step."""
    loss: LossNow | None
    setback: Setback | None
    zero_from: float | None
    nonfinite: tuple[NonFinite, ...]
    skipped: Skipped
    speed: Speed | None
    silence: Silence | None
    errors: tuple[Message, ...]
    warnings: tuple[Message, ...]
    remarks: tuple[Message, ...]
    record: Run | None


def findings_of(seen: Seen) -> tuple[Finding, ...]:
    """What is wrong, in the order in which it would explain the rest."""
    found = [finding for sees in _ALL for finding in sees(seen)]
    return tuple(found)


def _errors(seen: Seen) -> Iterator[Finding]:
    if not seen.errors:
        return
    last = seen.errors[-1]
    at = "" if last.last_step is None else f" at step {step_in_words(last.last_step)}"
    # An error before rows that came later is one that the run got over.
    ended = not seen.over and (last.last_step or 0) >= (seen.log.last_step or 0)
    yield Finding(
        "status.error",
        "critical" if ended else "warning",
        f"the log holds an error{at}: {last.text}",
        {
            "step": last.last_step,
            "others": [one.text for one in seen.errors[:-1]],
            "count": sum(one.count for one in seen.errors),
        },
        "look at the lines before it in the log; train.resume_from: auto goes on from the last checkpoint "
        "once its cause is gone",
        since=_step(last.last_step),
    )


def _ended_by_error(seen: Seen) -> Iterator[Finding]:
    end = None if seen.record is None else seen.record.info.get("end")
    error = end.get("error") if isinstance(end, dict) else None
    if error and not seen.errors:
        yield Finding(
            "status.error",
            "critical",
            f"the run ended with {error}",
            {"step": seen.log.last_step, "error": error},
            "look at the traceback; train.resume_from: auto goes on from the last checkpoint once its cause "
            "is "
            "gone",
            since=_step(seen.log.last_step),
        )


def _silence(seen: Seen) -> Iterator[Finding]:
    silence = seen.silence
    if silence is None or not silence.stale or seen.over:
        return
    usual = (
        "and nothing is known of its speed"
        if silence.usual is None
        else f"where {span(silence.usual)} is usual and {span(silence.longest or 0)} was the longest so far"
    )
    what = (
        "it stalled or was killed"
        if seen.log.finished is False  # its format has a line for the end
        else "it stalled, was killed, or has ended (this log does not tell)"
    )
    yield Finding(
        "status.stalled",
        "warning",
        f"nothing was written for {span(silence.seconds)}, {usual}: {what}",
        {
            "silent_s": silence.seconds,
            "usual_s": silence.usual,
            "longest_s": silence.longest,
            "allowed_s": silence.allowed,
        },
        "look whether the process is alive and what it waits for (py-spy dump --pid PID); if it is gone, "
        "train.resume_from: auto goes on from the last checkpoint",
    )


def _numbers(seen: Seen) -> Iterator[Finding]:
    of_run = [one for one in seen.nonfinite if known(one) and not one.ordinary]
    if of_run:
        first = of_run[0]
        lost = [one for one in of_run if one.still and one.metric.startswith(("train/", "eval/"))]
        now = (
            f"and {_list([one.metric for one in lost])} still {'is' if len(lost) == 1 else 'are'}"
            if lost
            else "and finite again since"
        )
        yield Finding(
            "status.nonfinite",
            "critical" if lost else "warning",
            f"{first.metric} was not finite first at step {step_in_words(first.first_step)} "
            f"({first.count:,} {'row' if first.count == 1 else 'rows'}), {now}",
            {
                "first_step": first.first_step,
                "metrics": {one.metric: one.first_step for one in of_run},
                "rows": {one.metric: one.count for one in of_run},
                "still": [one.metric for one in lost],
            },
            "train.resume_from: a checkpoint of before that step, with a third of train.learning_rate and "
            "train.max_grad_norm: 1.0; pgs diagnose --mode post --log_file looks for the cause",
            since=_step(first.first_step),
        )
    scaled = [one for one in seen.nonfinite if one.ordinary]
    if scaled:
        count = scaled[0].count
        yield Finding(
            "status.loss_scale",
            "info",
            f"the gradient norm was not finite at {count} {'row' if count == 1 else 'rows'} at which a loss "
            "scale skips steps",
            {"first_step": scaled[0].first_step, "last_step": scaled[0].last_step, "rows": count},
            "",
            since=_step(scaled[0].first_step),
        )
    others = [one for one in seen.nonfinite if not known(one)]
    if others:
        yield Finding(
            "status.nonfinite_other",
            "info",
            f"{_list([one.metric for one in others])} (whose meaning is not known) was no number first at "
            f"step {step_in_words(others[0].first_step)}",
            {"metrics": {one.metric: one.first_step for one in others}},
            "",
            since=_step(others[0].first_step),
        )


def _zero(seen: Seen) -> Iterator[Finding]:
    if seen.zero_from is not None:
        yield Finding(
            "status.zero_loss",
            "critical",
            f"the loss is exactly 0 since step {step_in_words(seen.zero_from)}: it stands for NaN, or no "
            "token bears loss",
            {"since_step": seen.zero_from},
            "logging_nan_inf_filter=False in a transformers Trainer lets the log say NaN; pgs validate says "
            "whether rows bear loss",
            since=_step(seen.zero_from),
        )


def _loss(seen: Seen) -> Iterator[Finding]:
    now = seen.loss
    if now is None:
        yield Finding(
            "status.no_loss",
            "warning",
            "the log holds no loss: nothing can be said of how training goes",
            {"metrics": sorted(seen.log.columns)},
            "log the training loss, under a name such as loss or train/loss",
        )
        return
    rising = diverging(now, seen.limits)
    if not rising and seen.setback is None:
        return
    told: list[str] = []
    evidence: dict[str, Any] = {}
    if rising:
        told.append(
            f"the loss rose by {number(now.change)} ({number(now.least)} to {number(now.most)}) over the "
            f"last {step_in_words(now.steps)} steps, to {number(now.level)}"
        )
        evidence |= {"change": now.change, "least": now.least, "most": now.most, "steps": now.steps}
    if seen.setback is not None:
        back = seen.setback
        told.append(
            f"it was {number(back.lowest)} at step {step_in_words(back.at_step)} and is {number(back.now)}"
        )
        evidence |= {"lowest": back.lowest, "lowest_step": back.at_step, "now": back.now}
    message = "; ".join(told)
    yield Finding(
        "status.diverging",
        "warning",
        message if rising else f"the loss has lost ground: {message}",
        evidence,
        "train.resume_from: a checkpoint of before the rise, with a third of train.learning_rate and "
        "train.max_grad_norm: 1.0",
        since=_step((seen.log.last_step or 0) - now.steps if seen.setback is None else seen.setback.at_step),
    )


def _skips(seen: Seen) -> Iterator[Finding]:
    if seen.skipped.share <= seen.limits.skipped:
        return
    most = seen.skipped.share >= seen.limits.skipped_most
    yield Finding(
        "status.skipped",
        "critical" if most else "warning",
        f"{seen.skipped.count:,} steps ({'at most ' if seen.skipped.at_most else ''}"
        f"{seen.skipped.share:.0%}) were skipped" + (": hardly anything is trained" if most else ""),
        {"steps": seen.skipped.count, "share": seen.skipped.share},
        "model.torch_dtype: bfloat16, which needs no loss scale, if they overflowed; a third of "
        "train.learning_rate if they were spikes",
    )


def _starts(seen: Seen) -> Iterator[Finding]:
    log = seen.log
    if not log.restarts:
        return
    last = log.restarts[-1]
    again = sum(max(one.from_step - one.to_step + 1, 0) for one in log.restarts)
    evidence = {
        "restarts": len(log.restarts),
        "steps_again": again,
        "last_from_step": last.from_step,
        "last_to_step": last.to_step,
    }
    if crash_loop(log, seen.limits):
        yield Finding(
            "status.crash_loop",
            "critical",
            f"the last {seen.limits.loop} starts got no further than step {step_in_words(last.from_step)}: "
            "the run fails at the same place",
            evidence,
            "look at the lines before each start in the log, and at the batch of that step (pgs inspect); "
            "starting it again will not help",
        )
        return
    times = "once" if len(log.restarts) == 1 else f"{len(log.restarts)} times"
    yield Finding(
        "status.restarted",
        "info",
        f"the run was started again {times}, last from step {step_in_words(last.to_step)} after "
        f"{step_in_words(last.from_step)}: {step_in_words(again)} steps were done again",
        evidence,
        "",
    )


def _slower(seen: Seen) -> Iterator[Finding]:
    speed = seen.speed
    if speed is None or not speed.slower or not speed.tokens_before or speed.tokens_per_sec is None:
        return
    yield Finding(
        "status.slower",
        "warning",
        f"{speed.tokens_per_sec:,.0f} tokens a second of late, {speed.tokens_before:,.0f} before: slower by "
        f"{1 - speed.tokens_per_sec / speed.tokens_before:.0%}",
        {"tokens_per_sec": speed.tokens_per_sec, "before": speed.tokens_before},
        "look for another program on the machine, heat, a file system that has become slow, memory that "
        "grows (health/host_rss_gb); data.num_workers: 4 if the device waits for data",
    )


def _told(seen: Seen) -> Iterator[Finding]:
    if seen.warnings:
        last = seen.warnings[-1]
        count = sum(one.count for one in seen.warnings)
        yield Finding(
            "status.warnings",
            "critical" if seen.record is not None and seen.record.verdict == CRITICAL else "warning",
            f"{count:,} {'warning' if count == 1 else 'warnings'} in the log, the last: {last.text}",
            {
                "count": count,
                "others": [one.text for one in reversed(seen.warnings[:-1])],
                "step": last.last_step,
            },
            "pgs report RUN shows the events of a run folder; pgs diagnose --mode post --log_file looks for "
            "causes",
        )
    if seen.remarks:
        count = sum(one.count for one in seen.remarks)
        yield Finding(
            "status.remarks",
            "info",
            f"{count:,} {'warning' if count == 1 else 'warnings'} of other programs that say nothing of the "
            "run, "
            f"the last: {seen.remarks[-1].text}",
            {"count": count, "others": [one.text for one in reversed(seen.remarks[:-1])]},
            "",
        )


def _monitored(seen: Seen) -> Iterator[Finding]:
    run = seen.record
    if run is not None and run.verdict in (NOT_MONITORED, PARTLY_MONITORED):
        yield Finding(
            "status.not_monitored",
            "warning",
            f"{run.verdict}: {run.verdict_sentence}",
            {"verdict": run.verdict},
            "call step() after loss.backward() and before optimizer.step(), on every rank",
        )


def _reading(seen: Seen) -> Iterator[Finding]:
    log = seen.log
    if log.lines and log.unread / log.lines > seen.limits.unread:
        yield Finding(
            "status.unread",
            "info",
            f"{log.unread:,} of {log.lines:,} lines are of no known form: there may be more in the log than "
            "is shown here",
            {"unread": log.unread, "lines": log.lines, "format": log.format},
            "",
        )


def _short(seen: Seen) -> Iterator[Finding]:
    log = seen.log
    if log.finished and log.total_steps and log.last_step is not None and not seen.errors:
        rows = log.live(log.loss_name).step
        apart = rows[-1] - rows[-2] if len(rows) > 1 else 1.0
        if log.last_step + apart < log.total_steps:
            yield Finding(
                "status.ended_early",
                "info",
                f"the run ended at step {step_in_words(log.last_step)} of {log.total_steps:,}",
                {"step": log.last_step, "of": log.total_steps},
                "",
            )


_ALL = (
    _errors,
    _ended_by_error,
    _numbers,
    _zero,
    _loss,
    _skips,
    _starts,
    _silence,
    _slower,
    _monitored,
    _told,
    _short,
    _reading,
)


def _step(step: float | None) -> int | None:
    return None if step is None else int(step)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
