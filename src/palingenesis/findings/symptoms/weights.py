"""Symptoms in the weights and in what the model puts out: imbalance, collapse, forgetting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import Series
from palingenesis.findings.symptoms.evaluation import only_worse, sources_apart
from palingenesis.findings.trends import trend

_NUMBER = re.compile(r"\d+")
_DRIFT, _RANK, _ENTROPY = "health/weight_drift", "health/stable_rank", "health/output_entropy"


def layer_imbalance(case: Case) -> Finding | None:
    """A block whose gradient, against its weights, is far above that of its likes, look after look."""
    limits = case.limits
    ratios = case.named("health/gw_ratio/")
    apart = _apart(ratios, case)
    apart = {block: factor for block, factor in apart.items() if factor >= limits.imbalance}
    if not apart:
        return None
    worst = max(apart, key=lambda block: apart[block])
    updates = _apart(case.named("health/update_ratio/"), case)
    # What an optimizer such as Adam evens out is worth knowing and needs no action.
    evened = worst in updates and updates[worst] < limits.imbalance_updates
    told = f"{worst} has {apart[worst]:.3g} times the gradient, against its weights, of blocks like it"
    return Finding(
        "run.layer_imbalance",
        "info" if evened else "warning",
        f"{told}; the optimizer evens it out (its updates are {updates[worst]:.2g} times its likes')"
        if evened
        else f"{told}: it learns faster than the rest",
        {"blocks": apart, "updates": {block: updates[block] for block in apart if block in updates}},
        f"train.learning_rate: {case.rate(1 / 2, 'half')}; train.optimizer: adamw evens blocks out, sgd "
        "does not",
        since=int(ratios[worst].step[0]),
        confidence=case.limits.agreeing if worst in updates else case.limits.single,
    )


def _apart(ratios: Mapping[str, Series], case: Case) -> dict[str, float]:
    """How many times its likes' median each block has, at four looks in five at least."""
    limits = case.limits
    kinds: dict[str, list[str]] = {}
    for block, series in ratios.items():
        if len(series.value) >= limits.imbalance_looks:
            kinds.setdefault(_NUMBER.sub("#", block), []).append(block)
    found: dict[str, float] = {}
    for blocks in kinds.values():
        if len(blocks) < limits.likes:
            continue
        steps = sorted(set.intersection(*(set(ratios[block].step.tolist()) for block in blocks)))
        if len(steps) < limits.imbalance_looks:
            continue
        table = np.stack([ratios[block].value[np.isin(ratios[block].step, steps)] for block in blocks])
        usual = np.median(table, axis=0)
        if (usual > 0).all():
            factors = np.quantile(table / usual, 0.2, axis=1, method="lower")
            found |= dict(zip(blocks, factors.tolist(), strict=True))
    return found


def representation_collapse(case: Case) -> Finding | None:
    floor = case.setting("stable_rank_floor", case.limits.stable_rank)
    low = _beyond(case, "stable_rank", f"{_RANK}/")
    if low is None:
        lowest = case.series(f"{_RANK}_min").value
        # Below from the start is how the model came.
        fell = len(lowest) > 1 and lowest[0] > floor > lowest[-1]
        low = {f"{_RANK}_min": float(lowest[-1])} if fell else {}
    if not low:
        return None
    worst = min(low, key=lambda name: low[name])
    return Finding(
        "run.representation_collapse",
        "warning",
        f"the stable rank of {worst} fell to {low[worst]:.3g} (floor {floor:g}): one direction takes "
        f"the matrix over{_and_others(len(low))}",
        {"stable_rank": low, "floor": floor},
        f"train.learning_rate: {case.rate(1 / 2, 'half')}",
        since=_crossed_at(case, "stable_rank", f"{_RANK}_min", lambda one: one.value < floor),
    )


def forgetting(case: Case) -> Finding | None:
    """Weights far from where they began, or a source that only ever got worse while others did not."""
    limits = case.limits
    ceiling = case.setting("drift_ceiling", limits.drift)
    far = _beyond(case, "weight_drift", f"{_DRIFT}/")
    if far is None:
        drift = case.series(f"{_DRIFT}_max").value
        # Numbers alone do not say that there was nothing to forget; the first losses do.
        random = case.loss.value[: limits.climb_first].min(initial=np.inf) > limits.random_loss
        known = len(drift) and not (case.loss and random)
        far = {f"{_DRIFT}_max": float(drift[-1])} if known and drift[-1] > ceiling else {}
    rises, still = sources_apart(case)
    worse = {name: rise for name, rise in rises.items() if still and only_worse(rise, case)}
    if not far and not worse:
        return None
    told, since = [], []
    if far:
        worst = max(far, key=lambda name: far[name])
        told.append(
            f"{worst} has drifted by {far[worst]:.2g} of its norm before training (ceiling {ceiling:g})"
            f"{_and_others(len(far))}"
        )
        since.append(_crossed_at(case, "weight_drift", f"{_DRIFT}_max", lambda one: one.value > ceiling))
    if worse:
        name = max(worse, key=lambda name: worse[name].share)
        told.append(
            f"the evaluation loss of {name} went up from {worse[name].first:.4g} to {worse[name].last:.4g} "
            "and never down"
        )
        since.append(min(rise.best_step for rise in worse.values()))
    return Finding(
        "run.forgetting",
        "warning",
        f"{' and '.join(told)}: what the model knew may be lost",
        {"drift": far, "ceiling": ceiling, "sources": {name: rise.share for name, rise in worse.items()}},
        f"train.learning_rate: {case.rate(1 / 2, 'half')}, fewer "
        "train.epochs, or model.lora: {rank: 16}; data.sources: add one of general text with mode pretrain",
        since=min((step for step in since if step is not None), default=None),
        confidence=limits.agreeing if far and worse else limits.shared,
    )


def _crossed_at(
    case: Case, diagnosis: str, metric: str, beyond: Callable[[Series], np.ndarray[Any, Any]]
) -> int | None:
    """The step at which a number crossed its bound: by the first event, or else by the numbers."""
    told = [event.step for event in case.events("bound_crossed") if event.diagnosis == diagnosis]
    return min(told) if told else case.first_beyond(case.series(metric), beyond)


def _and_others(count: int) -> str:
    return f", and so for {count - 1} more" if count > 1 else ""


def _beyond(case: Case, diagnosis: str, prefix: str) -> dict[str, float] | None:
    """Layers beyond a bound when the record ends; ``None`` where no such bound was watched."""
    watched = [
        event for event in case.source.events if event.event.startswith("bound_") and not event.superseded
    ]
    watched = [event for event in watched if event.diagnosis == diagnosis]
    if not watched and not any(name.startswith(prefix) for name in list(case.source.names)):
        return None
    beyond: dict[str, float] = {}
    for event in watched:
        told = _told(event.fields)
        if event.event == "bound_crossed" and not event.ordinary:
            beyond |= told
        elif event.event == "bound_cleared":
            beyond = {name: value for name, value in beyond.items() if name not in told}
    return {name.removeprefix(prefix): value for name, value in beyond.items()}


def _told(fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a bound's event: one, or several told together."""
    values = fields.get("values")
    if isinstance(values, dict) and values:
        return {str(name): float(value) for name, value in values.items()}
    value = fields.get("value")
    return {str(fields.get("metric")): float(value) if isinstance(value, (int, float)) else float("nan")}


def entropy_collapse(case: Case) -> Finding | None:
    """An output entropy that fell, by this run's doing, and surely is low."""
    limits = case.limits
    entropy, error = case.series(_ENTROPY), case.series(f"{_ENTROPY}_se")
    count = len(entropy.value)
    if count < limits.eval_after:
        return None
    allowance = 2 * float(np.median(error.value)) if error else 0.0
    late, early = entropy.value[-max(count // 5, 3) :], entropy.value[: max(count // 5, 1)]
    line = trend(entropy.step, entropy.value, limits.alpha)
    low = float(np.median(late)) + allowance < limits.entropy
    fell = line.high < 0 and np.median(late) < (1 - limits.entropy_fall) * np.median(early)
    if not (low and fell):
        return None
    below = entropy.step[entropy.value + allowance < limits.entropy]
    return Finding(
        "run.entropy_collapse",
        "warning",
        f"the output entropy fell from {np.median(early):.2f} to {np.median(late):.2f} nats (limit "
        f"{limits.entropy:g}): little is left for reinforcement learning to choose from",
        {
            "first": float(np.median(early)),
            "last": float(np.median(late)),
            "standard_error": allowance / 2,
            "below_since": int(below[0]),
        },
        f"train.max_steps: {int(below[0])}, before it got so low, or fewer train.epochs",
        since=int(below[0]),
    )
