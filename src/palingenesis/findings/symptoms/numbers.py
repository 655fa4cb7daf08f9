"""Symptoms of numbers that are wrong: not finite, never reset, rounded away, different between ranks."""

from __future__ import annotations

import numpy as np

from palingenesis.findings.case import COSINE, LOSS, NORM, RATE, RAW_NORM, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import median, trend


def replicas_diverge(case: Case) -> Finding | None:
    found = case.events("replica_divergence")
    if not found:
        return None
    first = found[0]
    where = f", first in {first.parameter}" if first.parameter else ""
    return Finding(
        "run.replicas_diverge",
        "critical",
        f"at step {first.step} ranks hold different bits of the same parameter{where}: they train different "
        "models from there on",
        {
            "step": first.step,
            "parameter": first.parameter,
            "ranks": first.ranks,
            "parameters": first.value,
            "events": len(found),
        },
        "train.resume_from: a checkpoint from before that step; and take out whatever changes parameters on "
        "one rank only",
    )


def no_zero_grad(case: Case) -> Finding | None:
    """Gradients that are never reset are sums: each looks like the last one, and they grow."""
    limits, cosine = case.limits, case.series(COSINE)
    if not cosine or not case.norm or case.clipped_only:
        return None
    middle = median(cosine.value, limits.alpha)
    growth = trend(case.norm.step, np.log(np.maximum(case.norm.value, 1e-300)), limits.alpha)
    grew = growth.low > 0 and growth.change > np.log(limits.norm_growth)
    if middle.low < limits.zero_grad_cosine or not grew:
        return None
    return Finding(
        "run.no_zero_grad",
        "critical",
        f"consecutive gradients are almost the same (median cosine {middle.value:.3f}) while their norm grew "
        f"{np.exp(growth.change):.3g}-fold: gradients are added up over steps",
        {
            "cosine": middle.value,
            "cosine_low": middle.low,
            "norm_growth": float(np.exp(growth.change)),
            "readings": len(cosine.value),
        },
        "call optimizer.zero_grad() after every optimizer.step(); pgs train does",
    )


def no_loss_tokens(case: Case) -> Finding | None:
    """A step without a loss-bearing token: loss and norm exactly zero, or no token counted."""
    empty: set[int] = set()
    loss, norm = case.series(LOSS), case.norm
    if loss and norm:
        zero_norm = set(norm.step[norm.value == 0].astype(int).tolist())
        empty |= zero_norm & set(loss.step[loss.value == 0].astype(int).tolist())
    tokens = case.series("train/tokens_total_all")
    still = np.diff(tokens.value) == 0
    empty |= set(tokens.step[1:][still].astype(int).tolist())
    if not empty:
        return None
    steps = sorted(empty)
    share = len(steps) / max(len(case.run.metrics.step), 1)
    return Finding(
        "run.no_loss_tokens",
        "critical" if share > 0.5 else "warning",
        f"{len(steps)} recorded steps ({share:.1%}) trained on no loss-bearing token, the first at step "
        f"{steps[0]}",
        {"steps": steps, "share": share},
        "data.max_seq_length: longer, if answers are cut off; model.chat_template: one that marks the "
        "answers, if they are not found (pgs validate says which)",
    )


def zero_loss_nan_norm(case: Case) -> Finding | None:
    """Loss 0.0 and a norm that is not finite: the log hides NaN behind a zero."""
    loss = case.series(LOSS)
    bad = set(case.nonfinite(RAW_NORM, NORM)) & set(loss.step[loss.value == 0].astype(int).tolist())
    if not bad:
        return None
    steps = sorted(bad)
    return Finding(
        "run.zero_loss_nan_norm",
        "critical",
        f"from step {steps[0]} the recorded loss is 0.0 while the gradient norm is not finite "
        f"({len(steps)} rows): the zero stands for NaN",
        {"steps": steps},
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, and train.resume_from: a checkpoint of before "
        "that step; in a transformers Trainer of your own logging_nan_inf_filter=False lets the log say NaN",
    )


def nan_hidden(case: Case) -> Finding | None:
    """A clean loss over gradients that stay non-finite to the end: the curve hides that all is lost."""
    bad = np.array(case.nonfinite(RAW_NORM, NORM))
    loss = case.series(LOSS)
    open_since = _open_episode(case)
    rows = loss.part(open_since) if open_since is not None else loss.part(np.inf)
    if len(bad):
        # The last rows, back to the last finite norm.
        finite = case.norm.step[-1] if case.norm else -np.inf
        rows = max(rows, loss.part(min(bad[bad > finite], default=np.inf)), key=lambda one: len(one.value))
    clean = rows.value[rows.value != 0]
    if len(clean) < case.limits.hidden_rows:
        return None
    since = int(rows.step[0])
    return Finding(
        "run.nan_hidden",
        "critical",
        f"since step {since} gradients are not finite and never recover, yet {len(clean)} rows show a clean "
        f"loss (last {clean[-1]:.4g}): the curve hides that the weights are lost",
        {"since": since, "rows": len(clean), "last_loss": float(clean[-1])},
        "train.resume_from: a checkpoint from before that step, with train.learning_rate at a third. In a "
        "transformers Trainer of your own set logging_nan_inf_filter=False",
    )


def _open_episode(case: Case) -> int | None:
    """The step since which gradients are not finite, if they were to the end."""
    since = None
    for event in case.events("nonfinite", "nonfinite_cleared"):
        gradients = "gradients" in str(event.source) and "loss" not in str(event.source)
        since = event.step if event.event == "nonfinite" and gradients else None
    return since


def nonfinite(case: Case) -> Finding | None:
    events = case.events("nonfinite")
    rows = case.nonfinite(LOSS, RAW_NORM, NORM)
    if not events and not rows:
        return None
    first = min([event.step for event in events] + rows)
    layers = [layer for event in events for layer in event.layers or []]
    where = f"; the first layer is {layers[0]}" if layers else ""
    return Finding(
        "run.nonfinite",
        "critical",
        f"loss or gradients are not finite, first at step {first}{where}",
        {"step": first, "episodes": len(events), "rows": rows, "layers": layers},
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, train.max_grad_norm: 1.0, and if weights are "
        "bfloat16 model.torch_dtype: float32; train.resume_from: a checkpoint from "
        "before that step",
    )


def updates_lost(case: Case) -> Finding | None:
    lost, error = case.series("health/update_lost_pct"), case.series("health/update_lost_pct_se")
    if not lost:
        return None
    allowance = 2 * float(np.median(error.value)) if error else 0.0
    middle = float(np.median(lost.value))
    if middle - allowance <= case.limits.updates_lost:
        return None
    return Finding(
        "run.updates_lost",
        "warning",
        f"in the median look {middle:.0f}% of the elements did not change, because their update rounded away "
        "in the dtype of the weights",
        {"update_lost_pct": middle, "standard_error": allowance / 2, "looks": len(lost.value)},
        "model.torch_dtype: float32, or train adapters (model.lora), which start small enough for bfloat16",
    )


def lr_schedule(case: Case) -> Finding | None:
    """The learning rate reaches its end long before the run does, or comes back after it."""
    limits, rates = case.limits, case.series(RATE)
    if len(rates.value) < 2:
        return None
    peak = float(rates.value.max())
    top = int(np.argmax(rates.value >= (1 - limits.schedule_back) * peak))
    lowest = float(rates.value[top:].min())
    if lowest > (1 - 2 * limits.schedule_back) * peak:
        return None  # it is constant, or has hardly begun to fall
    ended = top + int(np.argmax(rates.value[top:] <= lowest + limits.schedule_end * peak))
    at, last = int(rates.step[ended]), int(rates.step[-1])
    tail = (last - at) / max(last - int(rates.step[0]), 1)
    back = float(rates.value[ended:].max())
    returned = back > lowest + limits.schedule_back * peak and not case.events("run_resumed")
    # A restart that is planned comes back in one jump.
    if returned and np.diff(rates.value[ended:]).max() > (back - lowest) / 2:
        return None
    if tail < limits.schedule_tail and not returned:
        return None
    how = (
        f"and then came back to {back:.3g}"
        if returned
        else f"and stayed there for {tail:.0%} of the {last} steps"
    )
    return Finding(
        "run.lr_schedule",
        "warning",
        f"the learning rate was at its end ({lowest:.3g}) at step {at} {how}: the schedule runs about "
        f"{last / max(at, 1):.2g} times too fast",
        {"ended_at": at, "last_step": last, "peak": peak, "lowest": lowest, "came_back_to": back},
        "step the scheduler once an optimizer step, on no micro-batch and once for all ranks (pgs train "
        "does), and give it the number of optimizer steps: train.max_steps",
    )
