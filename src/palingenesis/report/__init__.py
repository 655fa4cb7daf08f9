"""A record in, a page for people out.

    write_html(run)    one self-contained report.html: no network, no inline style, a strict content policy
    render_text(run)   the same conclusions for a terminal or a pipe
    to_json(run)       the same conclusions for a script, as strict JSON

All three read what ``palingenesis.load_run`` returned and nothing else: a report can be made again long
after the model is gone. How the parts are split:

    words      text and numbers made safe and readable
    episodes   alarms paired with what ended them
    facts      everything a report says, before how it looks
    moments    what came first, in sentences
    history    layers x checks: norms, baselines, departures
    thin       long series and big tables made small without losing an extreme
    axes, svg, png, palette, strips     drawing
    timeline, marks, heatmap, frames, curves, tables   the sections of the page
    html, text, document                the three outputs
"""

from __future__ import annotations

from palingenesis.report.document import to_json
from palingenesis.report.html import write_html
from palingenesis.report.text import render_text

__all__ = ["render_text", "to_json", "write_html"]
