"""The log of torchtune on disk::

    Step 1 | loss:1.234567 lr:2e-05 tokens_per_second_per_gpu:1234.5 grad_norm:0.5

Shows steps, the loss of the step, learning rate, speed, memory, and the gradient norm if clipping is on. The
bar that torchtune draws on the terminal (``1|10|Loss: 1.23``) has epoch, step and loss only.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, word_pairs
from palingenesis.runlogs.spelling import NUMBER, number

_LINE = re.compile(r"(?:^|\s)Step (\d{1,15}) \| (?=\S{1,80}:)")
_BAR = re.compile(rf"(?:^|\s)(\d{{1,6}})\|(\d{{1,15}})\|Loss: ({NUMBER})")


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is not None:
        return Parsed({**word_pairs(text, found.end()), names.STEP: float(found[1])})
    found = _BAR.search(text)
    loss = number(found[3]) if found else None
    if found is None or loss is None:
        return None
    return Parsed({names.STEP: float(found[2]), names.EPOCH: float(found[1]), names.LOSS: loss})


FORMAT = LineFormat(
    "torchtune",
    _parse,
    marks=("Step ", "|Loss: "),
    loss_kind="step",
    cannot_show=("Gradient norms are there only if clipping is on.",),
)
