"""A record in, a page for people out; a log of any trainer, or several runs, as well.

    write_html(run)    one self-contained report.html: no network, no inline style, a strict content policy
    render_text(run)   the same conclusions for a terminal or a pipe
    to_json(run)       the same conclusions for a script, as strict JSON

Several runs or logs: ``subject.open_subject``, ``compare.compare`` and ``compare_page.write_comparison``.

All read what ``load_run`` or ``read_log`` returned and nothing else: a report can be made again when the
model is long gone. How the parts are split:

    words, options   text, numbers and configurations made safe and readable
    episodes         alarms paired with what ended them
    facts            everything a report says of a run, before how it looks
    subject          a run or a log, for what takes both
    moments          what came first, in sentences
    conclusions      findings, in words
    batches          what was in the batch at a spike
    history          layers x checks: norms, baselines, departures
    series           every number of a run by name
    panel, panels, layer_panels, signals_section, spending   which share a chart; where time went
    compare, parting                                           several runs, and where they part
    thin             long series and big tables made small without losing an extreme
    axes, svg, png, palette, strips, chart                     drawing
    timeline, marks, heatmap, frames, curves, tables           the other sections of the page
    page             what every page is made with
    html, log_page, compare_page, text, brief, document        the outputs
"""

from __future__ import annotations

from palingenesis.report.document import to_json
from palingenesis.report.html import write_html
from palingenesis.report.text import render_text

__all__ = ["render_text", "to_json", "write_html"]
