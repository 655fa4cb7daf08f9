"""The page of ``pgs loss --html``: the curve, what is found in it, what to do next."""

from __future__ import annotations

import os
from pathlib import Path

from palingenesis.findings.curve.analysis import CurveAnalysis
from palingenesis.findings.curve.facts import lines_of
from palingenesis.findings.finding import Report
from palingenesis.report.chart import Chart, EventLine, draw_panel
from palingenesis.report.conclusions import anchor_of, conclusions, title_of
from palingenesis.report.page import rendered, write_page
from palingenesis.report.panel import Line, Panel
from palingenesis.report.words import sentence, step_number, visible
from palingenesis.runlogs.table import Column

_LONG = 400
_MOST_SPIKES = 200


def write_curve_page(analysis: CurveAnalysis, report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page and return where it is.

    Raises:
        RecordError: the file cannot be written.
    """
    return write_page(Path(path), render_curve_page(analysis, report))


def render_curve_page(analysis: CurveAnalysis, report: Report) -> bytes:
    """The page of a curve."""
    chart = _chart(analysis, report)
    shown = [] if chart is None else [(chart.key, chart.title)]
    log = analysis.log
    return rendered(
        "curve.html",
        name=visible(log.source, 160),
        format=visible(log.format),
        tone="warning" if report.code else "unknown",
        word="FINDINGS" if report.code else "NOTHING FOUND",
        sentence=sentence(_sentence(report), _LONG),
        chart=chart,
        conclusions=conclusions(report.findings, shown),
        lines=[(visible(name), visible(text, _LONG)) for name, text in lines_of(analysis)],
        steps=[visible(text, _LONG) for text in report.facts["next_steps"]],
    )


def _sentence(report: Report) -> str:
    bad = [finding for finding in report.ordered if finding.severity != "info"]
    return bad[0].message if bad else "Nothing in this curve needs action."


def _chart(analysis: CurveAnalysis, report: Report) -> Chart | None:
    if analysis.rows < 2:
        return None
    start, end = float(analysis.step[0]), max(float(analysis.step[-1]), float(analysis.step[0]) + 1)
    lines = [Line("training loss", analysis.log.live(analysis.loss_name), "one", smoothed=False)]
    evaluated: Column = analysis.log.live("eval/loss")
    if evaluated and analysis.loss_name != "eval/loss":
        lines.append(Line("evaluation loss", evaluated, "two", dots=True))
    if analysis.course:
        label = "its law" if analysis.convergence is not None else "medians"
        lines.append(Line(label, analysis.course, "three"))
    panel = Panel("loss", "Loss", "Lines through the chart are findings and spikes.", tuple(lines))
    return draw_panel(panel, start, end, _events(analysis, report, start, end))


def _events(analysis: CurveAnalysis, report: Report, start: float, end: float) -> list[EventLine]:
    width = end - start
    spikes = [
        EventLine(
            (spike.step - start) / width, "warning", f"spike at step {step_number(int(spike.step))}", None
        )
        for spike in analysis.spikes[:_MOST_SPIKES]
    ]
    found = [
        EventLine(
            min(max(finding.since - start, 0.0) / width, 1.0),
            finding.severity,
            f"from step {step_number(finding.since)}: {title_of(finding.check)}",
            f"#{anchor_of(finding.check)}",
        )
        for finding in report.findings
        if finding.since is not None and finding.check != "curve.spikes"
    ]
    return [*spikes, *found]
