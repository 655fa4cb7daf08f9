"""What llm.c prints::

    step    1/19560 | loss 10.983121 (+nanz)| norm 15.3312 (+nanz)| lr 2.14e-06 | 1234.56 ms | 40.0% bf16 MFU
    | 425000 tok/s
    val loss 10.9321

Shows steps and how many there will be, loss of the step (mean over the ranks), gradient norm before clipping,
learning rate, time and tokens a second of all devices, evaluations. ``(+nanz)`` is the size of an outlier
that is not known yet, and no NaN.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.spelling import NUMBER, number

_LINE = re.compile(
    rf"step\s{{1,12}}(\d{{1,15}})/(\d{{1,15}}) \| (?:train )?loss ({NUMBER})(?: \([^)]{{0,20}}\))?\s?"
    rf"\| norm ({NUMBER})(?: \([^)]{{0,20}}\))?\s?\| lr ({NUMBER})(?: \| ({NUMBER}) ms)?"
    rf"(?: \| ({NUMBER})% \S{{1,12}} MFU)?(?: \| ({NUMBER}) tok/s)?"
)
_COLUMNS = (
    (names.STEP, 1.0),
    (names.TOTAL, 1.0),
    (names.LOSS, 1.0),
    ("train/grad_norm", 1.0),
    ("train/lr", 1.0),
    ("train/step_time_s", 1e-3),
    ("train/mfu", 1e-2),
    ("train/tokens_per_sec_global", 1.0),
)
_EVALUATION = re.compile(rf"^\s*val loss ({NUMBER})\s*$")


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is not None:
        row = {}
        for (name, factor), part in zip(_COLUMNS, found.groups(), strict=True):
            value = number(part) if part else None
            if value is not None:
                row[name] = value * factor
        return Parsed(row)
    found = _EVALUATION.search(text)
    value = number(found[1]) if found else None
    return None if value is None else Parsed({names.EVAL_LOSS: value})


FORMAT = LineFormat("llm.c", _parse, marks=("loss ",), loss_kind="step")
