"""A comparison, and a log, for a terminal or a pipe."""

from __future__ import annotations

from palingenesis.findings.finding import Report
from palingenesis.report.compare import Comparison, figures_of, tell_parting
from palingenesis.report.subject import Subject
from palingenesis.report.text import findings_text, wrapped
from palingenesis.report.words import number, sentence, step_number, visible

_MOST_SETTINGS = 30
_LONG_VALUE = 60


def comparison_text(comparison: Comparison, width: int) -> str:
    """Each run on a few lines, where they part, and what was set differently."""
    blocks = []
    for place, subject in enumerate(comparison.subjects):
        letter = comparison.letter(place)
        head = f"{letter}: {visible(subject.name)} ({visible(subject.place)})"
        serious = [one for one in Report("report", subject.findings).ordered if one.severity != "info"]
        found = ", ".join(one.check for one in serious) or "none"
        blocks.append(
            "\n".join(
                (
                    wrapped(head, width),
                    wrapped(f"{subject.verdict or 'log'}: {visible(subject.sentence)}", width, "  ", "  "),
                    wrapped(_figures(subject), width, "  ", "  "),
                    wrapped(f"findings: {found}", width, "  ", "  "),
                )
            )
        )
    for place, parting in enumerate(comparison.partings, 1):
        told = tell_parting(parting, comparison.letter(place))
        blocks.append("\n".join(wrapped(one, width) for one in told))
    blocks.append(_settings(comparison, width))
    return "\n\n".join(blocks) + "\n"


def _settings(comparison: Comparison, width: int) -> str:
    if not comparison.settings:
        known = comparison.settings_same
        return wrapped(
            f"All {known} known settings are the same." if known else "No settings are known.", width
        )
    lines = [f"Set differently ({comparison.settings_same} are the same)"]
    for setting in comparison.settings[:_MOST_SETTINGS]:
        values = ", ".join(
            f"{comparison.letter(place)} {visible(value, _LONG_VALUE)}"
            for place, value in enumerate(setting.values)
        )
        lines.append(wrapped(f"{setting.name}: {values}", width, "  ", "    "))
    left = len(comparison.settings) - _MOST_SETTINGS
    if left > 0:
        lines.append(f"  and {left} more")
    return "\n".join(lines)


def _figures(subject: Subject) -> str:
    figures = figures_of(subject)
    told = [
        "" if figures.last_step is None else f"step {step_number(figures.last_step)}",
        "" if figures.loss is None else f"loss {number(figures.loss)}",
        "" if figures.best_eval is None else f"best eval loss {number(figures.best_eval)}",
        "" if figures.tokens_per_second is None else f"{number(figures.tokens_per_second, 3)} tokens/s",
    ]
    return ", ".join(one for one in told if one)


def log_text(subject: Subject, width: int) -> str:
    """What is found in a log."""
    blocks = [
        wrapped(f"{visible(subject.place)} ({visible(subject.format)}): {sentence(subject.sentence)}", width),
        wrapped(_figures(subject), width),
        findings_text(subject.findings, width),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
