"""Symptoms of numbers that are wrong: not finite, never reset, rounded away, different between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palingenesis.findings.case import CE, COSINE, LOSS, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import NORM, RAW_NORM
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
        since=first.step,
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
        since=int(case.norm.step[0]),
        confidence=limits.agreeing,
    )


def no_loss_tokens(case: Case) -> Finding | None:
    """A step without a loss-bearing token: loss and norm exactly zero, or no token counted."""
    empty: set[int] = set()
    loss, norm = case.series(LOSS), case.norm
    if loss and norm:
        zero_norm = set(norm.step[norm.value == 0].astype(int).tolist())
        empty |= zero_norm & _exact_zeros(case)
    tokens = case.series("train/tokens_total_all")
    still = np.diff(tokens.value) == 0
    empty |= set(tokens.step[1:][still].astype(int).tolist())
    if not empty:
        return None
    steps = sorted(empty)
    share = len(steps) / max(case.source.rows_written, 1)
    return Finding(
        "run.no_loss_tokens",
        "critical" if share > 0.5 else "warning",
        f"{len(steps)} recorded steps ({share:.1%}) trained on no loss-bearing token, the first at step "
        f"{steps[0]}",
        {"steps": steps, "share": share},
        "data.max_seq_length: longer, if answers are cut off; model.chat_template: one that marks the "
        "answers, if they are not found (pgs validate says which)",
        since=steps[0],
    )


def _exact_zeros(case: Case) -> set[int]:
    """Steps at which the loss is 0, and not by being rounded: it was far from 0 right before."""
    loss = case.series(LOSS)
    zero = np.flatnonzero(loss.value == 0)
    other = np.flatnonzero(loss.value)
    if case.source.resolution and len(other):
        nearest = other[np.clip(np.searchsorted(other, zero) - 1, 0, None)]
        far = np.abs(loss.value[nearest]) > case.limits.zero_rounding * case.source.resolution
        zero = zero[far]
    return set(loss.step[zero].astype(int).tolist())


def zero_loss_nan_norm(case: Case) -> Finding | None:
    """Loss 0.0 and a norm that is not finite: the log hides NaN behind a zero."""
    loss = case.series(LOSS)
    bad = set(case.nonfinite(RAW_NORM, NORM)) & set(loss.step[loss.value == 0].astype(int).tolist())
    if not bad:
        return _zero_for_good(case)
    steps = sorted(bad)
    return Finding(
        "run.zero_loss_nan_norm",
        "critical",
        f"from step {steps[0]} the recorded loss is 0.0 while the gradient norm is not finite "
        f"({len(steps)} rows): the zero stands for NaN",
        {"steps": steps},
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, and train.resume_from: a checkpoint of before "
        "that step; in a transformers Trainer of your own logging_nan_inf_filter=False lets the log say NaN",
        since=steps[0],
    )


def _zero_for_good(case: Case) -> Finding | None:
    """The same where the log has no norm: from one row to the next the loss is 0.0, and stays so."""
    limits, loss = case.limits, case.loss
    zeros = len(loss.value) - int(np.max(np.flatnonzero(loss.value), initial=-1)) - 1
    before = loss.value[: len(loss.value) - zeros][-limits.onset_window :]
    known = bool(case.norm) or bool(case.nonfinite(RAW_NORM, NORM))
    if known or zeros < limits.hidden_rows or not len(before) or np.median(before) < limits.learned_loss:
        return None
    since = int(loss.step[-zeros])
    return Finding(
        "run.zero_loss_nan_norm",
        "critical",
        f"from step {since} to the end the recorded loss is exactly 0.0 ({zeros} rows), where it was "
        f"{np.median(before):.4g} right before: the zero stands for NaN",
        {"rows": zeros, "before": float(np.median(before))},
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, and train.resume_from: a checkpoint of before "
        "that step; in a transformers Trainer of your own logging_nan_inf_filter=False lets the log say NaN",
        since=since,
        confidence=limits.single,
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
        {"rows": len(clean), "last_loss": float(clean[-1])},
        "train.resume_from: a checkpoint from before that step, with train.learning_rate at a third. In a "
        "transformers Trainer of your own set logging_nan_inf_filter=False",
        since=since,
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
    rows, first = case.nonfinite(LOSS, CE, RAW_NORM, NORM), case.lost_at
    if first is None:
        return None
    layers = [layer for event in events for layer in event.layers or []]
    where = f"; the first layer is {layers[0]}" if layers else ""
    fix = (
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, train.max_grad_norm: 1.0, and if weights are "
        "bfloat16 model.torch_dtype: float32"
    )
    since = _finite_since(case, [*rows, *(event.step for event in events)])
    if since is None:
        fix += "; train.resume_from: a checkpoint from before that step"
    else:
        where += f"; finite again since step {since}"
    return Finding(
        "run.nonfinite",
        "critical" if since is None else "warning",
        f"loss or gradients {'are' if since is None else 'were'} not finite, first at step {first}{where}",
        {"step": first, "episodes": len(events), "rows": len(set(rows)), "layers": layers},
        fix,
        since=first,
    )


def _finite_since(case: Case, bad: Sequence[int]) -> int | None:
    """The step from which on all is finite to the end, if there are enough losses to say so.

    Weights with NaN in them give no finite loss, so what recovered has kept its weights. A loss of 0 proves
    nothing: trainers put it in the place of NaN.
    """
    if case.source.folder is not None:
        return None  # the verdict of a record says critical for good
    after = case.loss.part(max(bad) + 1)
    proving = after.step[after.value != 0]
    return int(proving[0]) if len(proving) >= case.limits.recovered_rows else None


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
        since=int(lost.step[0]),
    )
