"""The console of OLMo-core, a row over several lines::

    [step=1/100,epoch=1,eta=0:01:40]
        optim/LR (group 0)=0.0001
        optim/total grad norm=1.234
        train/CE loss=10.5
        throughput/device/TPS=12,345

Shows steps and how many there will be, loss of the step, learning rate, gradient norm, speed, memory,
evaluations. Numbers have four digits. The older OLMo writes ``[step=1/100]`` in the same way.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.names import metric_name
from palingenesis.runlogs.spelling import number

_HEAD = re.compile(r"\[step=(\d[\d,]{0,18})(?:/(\d[\d,]{0,18}))?(?:,epoch=(\d{1,9}))?[^\]]{0,200}\]")
_VALUE = re.compile(r"(?:^|(?<=\s\s)|(?<=\s-\s))([A-Za-z][^=\[\]]{0,120})=([^\s=]{1,40})\s*$")
_EVALUATION = re.compile(r"eval/(?:lm/)?(.{1,80})/(CE loss|PPL)")
_NAMED = {
    "train/CE loss": names.LOSS,
    "train/CrossEntropyLoss": names.LOSS,
    "train/PPL": "train/ppl",
    "train/Perplexity": "train/ppl",
    "optim/LR (group 0)": "train/lr",
    "optim/learning_rate_group0": "train/lr",
    "optim/total grad norm": "train/grad_norm",
    "throughput/device/TPS": "train/tokens_per_sec",
    "throughput/device/tokens_per_second": "train/tokens_per_sec",
    "throughput/total tokens": "train/tokens_total_all",
    "throughput/total_tokens": "train/tokens_total_all",
    "optim/step skipped": names.SKIPPED_NOW,
    "throughput/device/MFU": "mfu_percent",
    "system/GPU active mem (GiB)": "gib",
}


def _parse(text: str) -> Parsed | None:
    found = _HEAD.search(text)
    if found is not None:
        places = ((names.STEP, found[1]), (names.TOTAL, found[2]), (names.EPOCH, found[3]))
        return Parsed({name: float(part.replace(",", "")) for name, part in places if part})
    found = _VALUE.search(text)
    value = number(found[2]) if found else None
    if found is None or value is None:
        return None
    name = found[1].strip()
    column = _NAMED.get(name) or _evaluation(name)
    if column == "mfu_percent":
        column, value = "train/mfu", value * 1e-2
    elif column == "gib":
        column, value = "health/cuda_peak_gb", value * 2**30 / 1e9
    return Parsed({column: value}, goes_on=True)


def _evaluation(name: str) -> str:
    found = _EVALUATION.fullmatch(name)
    if found is None:
        return metric_name(name)
    return f"eval/{found[1]}/{'loss' if found[2] == 'CE loss' else 'ppl'}"


FORMAT = LineFormat(
    "olmo_core",
    _parse,
    marks=("=",),
    thousands=True,
    loss_kind="step",
    cannot_show=("Numbers are written with four digits: small changes of the loss are hidden.",),
)
