"""A status in words: on one line, and by what it is about."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from palingenesis.findings.finding import SEVERITIES
from palingenesis.findings.render import shortened, visible

if TYPE_CHECKING:
    from palingenesis.findings.status.events import Skipped
    from palingenesis.findings.status.loss import Evaluations, LossNow
    from palingenesis.findings.status.pace import Silence, Speed
    from palingenesis.findings.status.status import Status

#: Share of skipped steps that has a place in the one line: what is less rounds to 0.0%.
_TOLD_SHARE = 0.0005
#: Share of the time beside training that is told: what is less is the noise of two clocks.
_TOLD_ASIDE = 0.01
#: Findings in it, the worst; how many more there are is said.
_BRIEF_FINDINGS = 2
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def span(seconds: float) -> str:
    """A length of time in its two largest units: ``3 h 12 min``, ``0.4 s``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds > 0 else "0 s"
    left = round(seconds)
    for place, (unit, size) in enumerate(_UNITS):
        whole = left // size
        if whole:
            rest = (left - whole * size) // _UNITS[place + 1][1] if size > 1 else 0
            return f"{whole} {unit} {rest} {_UNITS[place + 1][0]}" if rest else f"{whole} {unit}"
    return "0 s"


def number(value: float | None) -> str:
    """A number with four digits at most; ``NaN`` and the like by name."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return f"{value:.4g}"


def step_in_words(step: float) -> str:
    """A step, or a number of them, as people write it: 12,300."""
    return f"{step:,.0f}" if float(step).is_integer() else f"{step:,.2f}"


def brief(status: Status) -> str:
    """All of it on one line."""
    parts = [verdict_and_state(status), f"step {_where(status)}"]
    if status.loss is not None:
        parts.append(f"loss {_loss(status.loss)}")
    if status.evaluations is not None:
        parts.append(f"eval {_evaluated(status.evaluations)}")
    speed = _speed(status.speed)
    if speed:
        parts.append(speed)
    if status.left is not None:
        parts.append(f"ETA {_left(status)}")
    if status.skipped.share >= _TOLD_SHARE:
        parts.append(f"skipped {status.skipped.share:.1%}")
    bad = [finding for finding in status.findings if finding.severity != "info"]
    bad.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    parts += [visible(finding.message) for finding in bad[:_BRIEF_FINDINGS]]
    if len(bad) > _BRIEF_FINDINGS:
        parts.append(f"{len(bad) - _BRIEF_FINDINGS} more")
    return " | ".join(parts)


def lines(status: Status) -> list[tuple[str, str]]:
    """What there is to tell, by what it is about."""
    told = [
        ("step", f"{_where(status)}{_counted(status)}{_epoch(status)}"),
        ("loss", _loss(status.loss) if status.loss is not None else "none in the log"),
    ]
    if status.loss is not None and status.loss.direction == "unclear" and math.isfinite(status.loss.least):
        told.append(("", f"its change is between {number(status.loss.least)} and {number(status.loss.most)}"))
    if status.evaluations is not None:
        told.append(("evaluation", _evaluated_fully(status.evaluations)))
        if len(status.evaluations.sources) > 1:
            sources = (
                f"{visible(name)} {number(value)}" for name, value in status.evaluations.sources.items()
            )
            told.append(("", shortened(sources)))
    speed = _speed(status.speed)
    told.append(("speed", speed or "not in the log"))
    aside = None if status.speed is None else status.speed.aside_share
    if aside is not None and aside >= _TOLD_ASIDE:
        told.append(("", f"{aside:.0%} of the time is evaluation, checkpoints and the like"))
    told += [("time left", _left(status)), ("skipped", _skipped(status.skipped))]
    told.append(("not finite", _nonfinite(status)))
    told.append(("last line", _silent(status.silence)))
    others = [
        ("learning rate", status.lr),
        ("gradient norm", status.grad_norm),
        ("peak memory, GB", status.memory_gb),
    ]
    told += [(name, number(value)) for name, value in others if value is not None]
    if status.restarts:
        told.append(("starts", f"{status.restarts + 1}"))
    told += [("not shown", text) for text in status.cannot_show[:1]]
    told += [("", text) for text in status.cannot_show[1:]]
    return told


def verdict_and_state(status: Status) -> str:
    """``WARNING, running``."""
    return status.verdict if status.state == "unknown" else f"{status.verdict}, {status.state}"


def _where(status: Status) -> str:
    step = "none yet" if status.step is None else step_in_words(status.step)
    if status.total_steps is None:
        return step
    return f"{step} of {status.total_steps:,} ({status.share_done or 0:.0%})"


def _counted(status: Status) -> str:
    return " (counted: the log has no steps)" if status.step_inferred else ""


def _epoch(status: Status) -> str:
    return "" if status.epoch is None else f", epoch {number(status.epoch)}"


def _loss(now: LossNow) -> str:
    shown = number(now.level if math.isfinite(now.value) else now.value)
    if now.losses < 2:
        return shown
    over = f"over the last {step_in_words(now.steps)} {'step' if now.steps == 1 else 'steps'}"
    if now.direction == "unclear":
        return f"{shown}, no clear trend {over}"
    if now.direction == "flat":
        return f"{shown}, flat {over}"
    least, most = sorted((abs(now.least), abs(now.most)))
    return f"{shown}, {now.direction} by {number(abs(now.change))} ({number(least)} to {number(most)}) {over}"


def _evaluated(found: Evaluations) -> str:
    if not math.isfinite(found.best):
        return number(found.last)
    best = (
        "best"
        if found.last <= found.best
        else f"best {number(found.best)} at step {step_in_words(found.best_step)}"
    )
    return f"{number(found.last)} ({best})" if found.count > 1 else number(found.last)


def _evaluated_fully(found: Evaluations) -> str:
    gap = "" if found.gap is None else f", {found.gap:+.3g} against training"
    return f"{_evaluated(found)} at step {step_in_words(found.step)}{gap}"


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return ""
    parts = []
    if speed.tokens_per_sec is not None:
        varies = "" if speed.tokens_spread is None else f" ±{speed.tokens_spread:.0%}"
        parts.append(f"{speed.tokens_per_sec:,.0f} tok/s{varies}")
    if speed.step_time_s is not None:
        parts.append(f"{span(speed.step_time_s)} a step")
    return ", ".join(parts)


def _left(status: Status) -> str:
    left = status.left
    if left is None:
        return _why_unknown(status)
    text = span(left.seconds)
    if left.low is not None and left.high is not None and left.high > left.low:
        text += f" ({span(left.low)} to {span(left.high)})"
    return text


def _why_unknown(status: Status) -> str:
    if status.over:
        return "none, the run has ended"
    if status.state == "stalled":
        return "unknown, nothing is written any more"
    if status.total_steps is None:
        return "unknown, the log does not say how many steps there will be"
    return "unknown, the log has no times"


def _skipped(found: Skipped) -> str:
    if not found.count:
        return "no step that the log tells of"
    most = "at most " if found.at_most else ""
    return f"{found.count:,} {'step' if found.count == 1 else 'steps'} ({most}{found.share:.1%})"


def _nonfinite(status: Status) -> str:
    if not status.nonfinite:
        return "nothing"
    first = status.nonfinite[0]
    rows = "1 row" if first.count == 1 else f"{first.count:,} rows"
    last = "" if first.count == 1 else f", last at {step_in_words(first.last_step)}"
    more = f"; {len(status.nonfinite) - 1} more" if len(status.nonfinite) > 1 else ""
    return f"{visible(first.metric)} at {rows}, first at step {step_in_words(first.first_step)}{last}{more}"


def _silent(silence: Silence | None) -> str:
    if silence is None:
        return "unknown, this is a pipe"
    usual = "" if silence.usual is None else f", usual are {span(silence.usual)}"
    return f"{span(silence.seconds)} ago{usual}"
