"""What trainers call their numbers, and what a record calls them.

A name that is not known is kept below ``other/``: nothing is taken for what it may not be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

#: Columns that are no metrics: where a row stands.
STEP, TOTAL, RANK, TIME = "step", "total_steps", "rank", "time"
#: Where a progress bar stands, and what it goes to.
BAR, BAR_END = "bar", "bar_end"
#: Seconds since the run began.
ELAPSED = "elapsed"
#: Steps left out since the row before.
SKIPPED_NOW = "skipped_now"
PLACES = frozenset({STEP, TOTAL, RANK, TIME, BAR, BAR_END, ELAPSED, SKIPPED_NOW})
EPOCH, LOSS, CE, EVAL_LOSS = "train/epoch", "train/loss", "train/ce_loss", "eval/loss"
#: Steps whose update was left out, counted from the start.
SKIPPED = "train/skipped_steps"

_ALIASES = {
    STEP: "step steps global_step iteration iter it _step train/global_step trainer/global_step "
    "current_steps "
    "train_step training_step",
    TOTAL: "total_steps max_steps train_iters total_iterations num_steps",
    TIME: "_timestamp wall_time unix_time",
    EPOCH: "epoch epochs current_epoch",
    LOSS: "loss train_loss training_loss lm_loss batch_loss step_loss avg_loss mean_loss loss_step "
    "train_loss_step "
    "loss_metrics/global_avg_loss global_avg_loss train_loss_epoch total_loss nll",
    CE: "ce_loss ce cross_entropy nll_loss cross_entropy_loss train_ce_loss",
    EVAL_LOSS: "eval_loss val_loss valid_loss validation_loss eval_loss_epoch val_loss_epoch dev_loss "
    "loss_val "
    "validation_metrics/loss lm_loss_value",
    "train/lr": "lr learning_rate current_lr optim/lr lr_group_0",
    "train/grad_norm": "grad_norm gradient_norm gnorm norm total_grad_norm optim/total_grad_norm gradnorm",
    "train/ppl": "ppl perplexity train_ppl train_perplexity",
    "eval/ppl": "eval_ppl val_ppl eval_perplexity val_perplexity lm_loss_ppl",
    "train/tokens_per_sec": "tps tokens_per_second tokens_per_sec tokens_per_second_per_gpu tok_per_sec "
    "tokens_per_sec_per_gpu throughput(tps) throughput/device/tps throughput_per_gpu",
    "train/tokens_per_sec_global": "tok/s tok/sec tokens/s tokens/sec tokens_per_sec_global throughput/tps",
    "train/tokens_total_all": "num_tokens consumed_tokens tokens_seen total_tokens num_input_tokens_seen "
    "throughput/total_tokens n_tokens_seen",
    "train/step_time_s": "dt step_time step_time_s iter_time time_per_step seconds_per_step "
    "time_per_iteration "
    "elapsed_time_per_iteration time/step batch_time",
    "train/mfu": "mfu",
    "train/token_accuracy": "mean_token_accuracy token_accuracy token_acc",
    "health/output_entropy": "entropy",
    "health/loss_scale": "loss_scale",
    "health/cuda_peak_gb": "memory memory_gb peak_memory_active cuda_peak_gb peak_mem max_memory_gb",
    SKIPPED: "skipped skipped_steps",
    "train/batch_size": "global_batch_size batch_size",
}
_KNOWN = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}

#: What a record itself writes below ``train/``; taken as it is.
_OURS = frozenset(
    [
        "train/loss",
        "train/ce_loss",
        "train/token_gate",
        "train/ppl",
        "train/lr",
        "train/grad_norm",
        "train/grad_norm_raw",
        "train/tokens_per_sec",
        "train/tokens_per_sec_global",
        "train/tokens_total",
        "train/tokens_total_all",
        "train/step_time_s",
        "train/epoch",
        "train/spikes_skipped",
        "train/adagc_clips",
        "train/eval_s",
        "train/checkpoint_s",
        "train/mfu",
    ]
)
_EVAL = re.compile(r"(?:eval|val|valid|validation|dev|test)[/_](.*)")
_UNKNOWN_BELOW = "other/"


@lru_cache(maxsize=4096)
def metric_name(raw: str) -> str:
    """The column of a number, by what the log calls it.

    >>> metric_name("learning_rate"), metric_name("eval_wiki_loss"), metric_name("reward")
    ('train/lr', 'eval/wiki/loss', 'other/reward')
    """
    text = re.sub(r"[\s-]+", "_", raw.strip().strip("'\"").lower())
    if text in _KNOWN:
        return _KNOWN[text]
    if text in _OURS or text.startswith("health/"):
        return raw.strip() if text.startswith("health/") else text
    found = _EVAL.fullmatch(text)
    if found:
        return _evaluation(found[1])
    if text.startswith("train/train_"):
        # What transformers says of the whole run at its end, in trackers: no step's loss.
        return _UNKNOWN_BELOW + raw.strip()
    for prefix in ("train/", "train_", "training/"):
        rest = text.removeprefix(prefix)
        if rest != text and rest in _KNOWN and _KNOWN[rest].startswith(("train/", "health/")):
            return _KNOWN[rest]
    if text.startswith("train/lr/"):
        return text
    return _UNKNOWN_BELOW + raw.strip()


def _evaluation(rest: str) -> str:
    """Of an evaluation: all of it (``loss``), or of one source (``wiki_loss``, ``wiki/loss``)."""
    if rest in ("loss", "ppl", "gap"):
        return f"eval/{rest}"
    if rest in _KNOWN and _KNOWN[rest] in (LOSS, CE):
        return EVAL_LOSS
    if rest == "runtime":
        return "train/eval_s"
    found = re.fullmatch(r"(.+)[/_](?:ce_)?loss", rest)
    return f"eval/{found[1]}/loss" if found else f"eval/{rest}"


def is_loss(name: str) -> bool:
    """Whether a column is a loss, of training or of an evaluation."""
    return name in (LOSS, CE) or (name.startswith("eval/") and name.endswith("/loss"))


def renamed(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Values by the name of their column; the first of two that mean the same counts."""
    row: dict[str, float] = {}
    for raw, value in values:
        row.setdefault(metric_name(raw), value)
    return row
