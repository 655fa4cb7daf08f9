"""What torchtitan prints, in colours::

    [titan] 2026-01-01 00:00:00,000 - root - INFO - step:  1  loss:  8.12345  grad_norm:  1.2345  memory:
    40.12GiB(50.00%)  tps: 1,234  tflops: 123.45  mfu: 12.34%
    validate step: 100  loss:  7.1234  memory: …

Shows steps, loss of the step (mean over the ranks), gradient norm before clipping, peak memory, tokens a
second of a device, share of the device's peak, evaluations. Lacks the learning rate.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, word_pairs
from palingenesis.runlogs.spelling import NUMBER

_LINE = re.compile(
    r"(validate )?\bstep:\s{1,12}(\d[\d,]{0,14})\s{2,12}(?:epoch:\s{1,9}[\d.]{1,9}\s{1,9})?(?=\w{0,20}loss: )"
)
_SHARE = re.compile(rf"memory:\s{{1,9}}{NUMBER}GiB\((\d{{1,3}}(?:\.\d{{1,6}})?)%\)")


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is None:
        return None
    row = word_pairs(text, found.end())
    share = _SHARE.search(text, found.end())
    if share is not None:
        row["health/cuda_utilization_pct"] = float(share[1])
    step = {names.STEP: float(found[2].replace(",", ""))}
    if found[1] and names.LOSS in row:
        return Parsed({**step, names.EVAL_LOSS: row[names.LOSS]})
    return Parsed({**row, **step})


FORMAT = LineFormat(
    "torchtitan",
    _parse,
    marks=("step: ",),
    thousands=True,
    loss_kind="step",
    cannot_show=("The learning rate is not in the log.",),
)
