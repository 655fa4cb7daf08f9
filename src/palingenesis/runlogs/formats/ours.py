"""The log of this project, ``train.log`` of ``pgs train`` and of a Monitor::

    2026-11-30 00:58:21,089 INFO step=100 loss=1.2345 lr=2.00e-05 grad_norm=0.812 tok/s=5321 dt=0.52s
    health/grad_cosine_sim=0.42 …

Shows steps, the loss of the step (and its cross-entropy ``ce_loss``, where the objective is another),
learning rate, clipped gradient norm, tokens a second of all ranks, seconds a step and health numbers. Hides
what lies between two lines, single layers and the raw gradient norm: the run folder has them.
"""

from __future__ import annotations

import re

from palingenesis.runlogs.formats.base import ROUNDED, LineFormat, Parsed
from palingenesis.runlogs.names import metric_name
from palingenesis.runlogs.spelling import number

# Health lines of a Monitor may have no loss; then a health number follows the step.
_LINE = re.compile(
    r"(?:^|\s)step=(\d+) (?=(?:loss|ce_loss|lr|grad_norm|tok/s|dt|eval/\S{1,80}|health/\S{1,80})=)"
)
_END = re.compile(r"step \d+: run_ended: ")


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is None:
        return Parsed({}, ended=True) if _END.search(text) else None
    row = {"step": float(found[1])}
    for pair in text[found.end() :].split():
        raw, _, written = pair.partition("=")
        value = number(written.removesuffix("s") if raw == "dt" else written)
        if value is not None:
            row.setdefault(metric_name(raw), value)
    return Parsed(row)


FORMAT = LineFormat(
    "palingenesis_log",
    _parse,
    marks=("step=", "run_ended"),
    loss_kind="step",
    cannot_show=(
        ROUNDED,
        "The gradient norm is that after clipping, and steps between two lines are left out; the run folder "
        "has both, and numbers of single layers.",
    ),
)
