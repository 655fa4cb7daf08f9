"""``trainer_log.jsonl`` of LLaMA-Factory::

    {"current_steps":10,"total_steps":100,"loss":1.2,"lr":5e-05,"epoch":0.1,"percentage":10.0,"elapsed_time":"0:00:10"}

Shows steps, how many there will be, loss, learning rate, epochs. Lacks gradient norms; the loss is the mean
over the logging steps, as the trainer of transformers has it.
"""

from __future__ import annotations

from palingenesis.runlogs.formats import jsonl
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.formats.transformers import CANNOT_SHOW


def _parse(text: str) -> Parsed | None:
    return jsonl.parse(text)


FORMAT = LineFormat(
    "llamafactory",
    _parse,
    marks=('"current_steps"',),
    loss_kind="interval_mean",
    cannot_show=(*CANNOT_SHOW, "Gradient norms are not in the log."),
)
