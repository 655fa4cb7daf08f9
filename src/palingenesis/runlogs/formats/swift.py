"""``logging.jsonl`` of ms-swift, and what it prints::

    {"loss":1.435,"grad_norm":3.48,"learning_rate":1.6e-05,"global_step/max_steps":"8270/11043"}

Shows steps, how many there will be, loss, gradient norm, learning rate, evaluations, memory. The loss is the
mean over the logging steps, as the trainer of transformers has it.
"""

from __future__ import annotations

from palingenesis.runlogs.formats import jsonl, transformers
from palingenesis.runlogs.formats.base import LineFormat, Parsed


def _parse(text: str) -> Parsed | None:
    return transformers.FORMAT.parse(text) if "{'" in text else jsonl.parse(text)


FORMAT = LineFormat(
    "ms_swift",
    _parse,
    marks=("global_step/max_steps",),
    loss_kind="interval_mean",
    cannot_show=transformers.CANNOT_SHOW,
)
