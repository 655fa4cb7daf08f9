"""What each verdict means for the person who reads it, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from palingenesis.findings.finding import Finding, Report
from palingenesis.findings.status.causes import likely
from palingenesis.findings.status.limits import StatusLimits
from palingenesis.record.verdict import CRITICAL, WARNING, WORDS
from palingenesis.report.facts import Facts
from palingenesis.report.words import count, step_number, visible

_MEANINGS = {
    "CRITICAL": "Something happened that training does not recover from by itself.",
    "NOT MONITORED": "Nothing can be said about this run: no check saw a gradient.",
    "PARTLY MONITORED": "Some of this run was not seen, so a fault may have gone unnoticed.",
    "WARNING": "Something left its normal range and deserves a look.",
    "INTERRUPTED": "Nothing was found up to where the record stops, and the run did not come to its end.",
    "UNKNOWN": "Whether this run was well cannot be said.",
    "HEALTHY": "Alarms could have fired, and none did.",
}


def overall(verdict: str, told: str, findings: Sequence[Finding]) -> tuple[str, str]:
    """The worse of the record's verdict and of what is found over the whole run, and the fact behind it.

    The verdict is about events that rang while the run went on; some faults show only in all of it. What
    counts is what ``pgs monitor`` tells: findings that are likelier than not.
    """
    found = Report("report", likely(Report("report", tuple(findings)).ordered, StatusLimits())).ordered
    if not found:
        return verdict, told
    worst = next((one for one in found if one.severity == "critical"), found[0])
    word = CRITICAL if worst.severity == "critical" else WARNING
    return (word, worst.message) if WORDS.index(word) < WORDS.index(verdict) else (verdict, told)


def overall_of(facts: Facts) -> tuple[str, str]:
    """The same of what was read."""
    return overall(facts.verdict, facts.sentence, facts.findings)


def meaning(facts: Facts) -> str:
    """One sentence that holds for every run with this verdict."""
    word, _ = overall_of(facts)
    if word == facts.verdict:
        return _MEANINGS.get(word, "")
    return (
        f"Found over the whole run. What the monitor said of it: {facts.verdict}: {visible(facts.sentence)}."
    )


def advice(facts: Facts) -> str:
    """What to do next, where no event says what to look at."""
    config = facts.config
    if facts.lacking is not None:
        return (
            "Run pgs verify on the folder to see what is missing or was changed; what this page shows is "
            "only what is left of the record."
        )
    if overall_of(facts)[0] != facts.verdict:
        return "The findings say what to change."
    if facts.verdict == "NOT MONITORED":
        return (
            "Call mon.step(loss) after loss.backward() and before the gradients are cleared, and train "
            "again: until then alarms cannot fire."
        )
    if facts.verdict == "UNKNOWN":
        needed = config.check_every * (config.warmup + config.consecutive)
        return (
            f"A baseline needs {count(config.warmup, 'check')} and an alarm {config.consecutive} more to "
            f"compare with it, by step {needed:,} with check_every={config.check_every}; this run made "
            f"{count(facts.checks, 'check')} in {count(facts.last_step, 'step')}. Train longer, or set "
            "check_every lower."
        )
    if facts.verdict == "INTERRUPTED" and facts.end is None:
        return (
            f"The record stops at step {step_number(facts.last_step)} without an end: the process was "
            "killed, or it is still running. What came after that step is not known."
        )
    if facts.verdict == "INTERRUPTED":
        last = step_number(facts.last_step)
        return f"An exception ended training at step {last}; look for it in the program's own log."
    if facts.verdict == "PARTLY MONITORED":
        return "See below what was monitored and what was not."
    if facts.verdict == "HEALTHY" and not facts.loss_given.any():
        return "No loss was passed to the monitor, so nothing is known of it."
    if facts.verdict == "HEALTHY":
        return "There is nothing to look at first."
    return "The events below are in the order in which they happened."
