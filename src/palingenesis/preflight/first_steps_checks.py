"""What the first optimizer steps must show: losses, gradients, learning rates, batches of processes.

Each takes what it looks at as arguments and trains nothing by itself, so that any training code can be held
against them; :mod:`palingenesis.preflight.first_steps` gives them what ``pgs train`` would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from palingenesis.findings import Finding

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

IGNORED = -100
#: First loss of a pretrained model, as a share of ln(vocabulary), from which it knows no more than chance
#: does.
AT_RANDOM = 0.8
#: How far losses may be apart, as a share, and gradients in norm, as a share; by format of the weights.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOSS_TOLERANCE_IN_HALF, _GRADIENT_TOLERANCE_IN_HALF = 2e-2, 5e-2
#: A schedule is arithmetic: what is further off is another schedule.
SCHEDULE_TOLERANCE = 1e-9
_FASTEST = 1024
#: Least fall of the loss over the overfit, as a share, beyond what rounding does.
LEAST_FALL = 1e-3
_NAMED = 10


# -- first loss --------------------------------------------------------------------------------------------


def whole_cross_entropy(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of a batch from the model's whole logits, and its loss-bearing tokens."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "fingerprint")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    targets = batch["labels"][:, 1:]
    summed = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return summed, int((targets != IGNORED).sum())


def check_first_loss(
    ours: float, independent: float, *, vocabulary: int, pretrained: bool, dtype: torch.dtype
) -> list[Finding]:
    """The mean cross-entropy before the first step.

    Args:
        ours: as training computes it.
        independent: from the model's whole logits.
        vocabulary: how many tokens there are.
        pretrained: whether the model has been trained before.
        dtype: of the weights.
    """
    chance = math.log(vocabulary)
    evidence = {"loss": ours, "independent": independent, "ln_vocabulary": chance}
    if not math.isfinite(ours):
        return [
            Finding(
                "first_step.loss_not_finite",
                "critical",
                f"the loss is {ours} before the first step",
                evidence,
                "set model.torch_dtype to float32, and if it stays look for broken weights in "
                "model.name_or_path",
            )
        ]
    found = []
    if not abs(ours - independent) <= LOSS_TOLERANCE.get(dtype, _LOSS_TOLERANCE_IN_HALF) * abs(independent):
        found.append(
            Finding(
                "first_step.loss_differs",
                "critical",
                f"training's cross-entropy is {ours:.4f} and that of the model's own logits "
                f"{independent:.4f}",
                evidence,
                "set memory.chunked_loss to false, and model.use_liger_kernel and model.compile to false; if "
                "it stays, report it",
            )
        )
    if pretrained and independent >= AT_RANDOM * chance:
        found.append(
            Finding(
                "first_step.loss_at_random",
                "critical",
                f"the loss of a pretrained model is {independent:.2f} before the first step, and guessing "
                f"has ln({vocabulary}) = {chance:.2f}: weights were not loaded, or the tokenizer is another "
                "model's",
                evidence,
                "set model.name_or_path to a folder that has all of the model's weights and its own "
                "tokenizer",
            )
        )
    return found


# -- gradients ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two gradients of the same thing: ``error`` is the norm of their difference, by that of the second.

    ``ratio`` is the first's norm by the second's, ``cosine`` that of the angle between them.
    """

    error: float
    ratio: float
    cosine: float


def compare(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Comparison:
    """Gradients by name; one that is missing is zero."""
    difference = first = second = product = 0.0
    for name in {*one, *other}:
        size = other[name] if name in other else one[name]
        left, right = (
            each[name].double().flatten() if name in each else torch.zeros(size.numel(), dtype=torch.float64)
            for each in (one, other)
        )
        difference += float((left - right).square().sum())
        first += float(left.square().sum())
        second += float(right.square().sum())
        product += float(left @ right)
    if not second:
        return Comparison(0.0 if not first else math.inf, math.nan, math.nan)
    cosine = product / math.sqrt(first * second) if first else 0.0
    return Comparison(math.sqrt(difference / second), math.sqrt(first / second), cosine)


def check_accumulation(found: Comparison, *, micro_batches: int, dtype: torch.dtype) -> list[Finding]:
    """That micro-batches give the gradient of all their rows together."""
    if found.error <= GRADIENT_TOLERANCE.get(dtype, _GRADIENT_TOLERANCE_IN_HALF):
        return []
    longer = abs(found.ratio - 1) > 0.02
    told = f"{found.ratio:.3g} times as long" if longer else f"at an angle of cosine {found.cosine:.4f}"
    return [
        Finding(
            "first_step.accumulation",
            "critical",
            f"the gradient accumulated over {micro_batches} micro-batches is off by {found.error:.1%} from "
            f"that of their rows together ({told}): micro-batches are weighted by something else than their "
            "tokens",
            {
                "error": found.error,
                "ratio": found.ratio,
                "cosine": found.cosine,
                "micro_batches": micro_batches,
            },
            "divide the loss by the loss-bearing tokens of the whole window; until then set "
            "train.gradient_accumulation_steps to 1",
        )
    ]


# -- processes ---------------------------------------------------------------------------------------------


def check_ranks(rows: Sequence[Sequence[int]]) -> list[Finding]:
    """That no two processes train on the same batches.

    Args:
        rows: of each process, fingerprints of its batches in order.
    """
    same = [
        (one, other)
        for other in range(len(rows))
        for one in range(other)
        if rows[one] and list(rows[one]) == list(rows[other])
    ]
    if not same:
        return []
    return [
        Finding(
            "first_step.same_rows",
            "critical",
            f"of {len(rows)} processes, {same[0][0]} and {same[0][1]} train on the same rows"
            + (f", and {len(same) - 1} other pairs" if len(same) > 1 else ""),
            {"pairs": [list(pair) for pair in same[:_NAMED]], "processes": len(rows)},
            "give every process its own share of the data (a DistributedSampler, or accelerate's prepare)",
        )
    ]


# -- schedule ----------------------------------------------------------------------------------------------


def planned_rate(config: TrainConfig, steps: int, done: int) -> float:
    """The learning rate of the step after ``done`` of ``steps``, worked out from the configuration."""
    train = config.train
    warmup = math.ceil(train.warmup_ratio * steps)
    high, low = train.learning_rate, train.min_learning_rate
    if done < warmup:
        return high * done / max(1, warmup)
    if train.lr_scheduler == "constant":
        return high
    part = min(1.0, (done - warmup) / max(1, steps - warmup))
    falls = 0.5 * (1 + math.cos(math.pi * part)) if train.lr_scheduler == "cosine" else 1 - part
    return low + (high - low) * falls


def check_schedule(seen: Sequence[float], planned: Callable[[int], float]) -> list[Finding]:
    """That the learning rates of the first steps are those of the plan.

    Args:
        seen: of step 1, 2, and so on.
        planned: the learning rate after so many steps are done.
    """

    def off(times: int) -> float:
        pairs = [(rate, planned(times * done)) for done, rate in enumerate(seen)]
        highest = max((abs(plan) for _, plan in pairs), default=0.0) or 1.0
        return max((abs(rate - plan) for rate, plan in pairs), default=0.0) / highest

    if off(1) <= SCHEDULE_TOLERANCE:
        return []
    faster = next((times for times in range(2, _FASTEST) if off(times) <= 1e-6), None)
    wanted = [planned(done) for done in range(len(seen))]
    told = f": it goes {faster} times as fast as it should" if faster else ""
    return [
        Finding(
            "first_step.schedule",
            "critical",
            f"the learning rates of the first {len(seen)} steps are not those of the schedule{told}",
            {"seen": list(seen), "planned": wanted, "times_as_fast": faster},
            "step the scheduler once an optimizer step, on every process alike, not once a micro-batch; with "
            "pgs train set train.lr_scheduler to constant, and report it",
        )
    ]


# -- overfit -----------------------------------------------------------------------------------------------


def check_overfit(losses: Sequence[float], *, learning_rate: float) -> list[Finding]:
    """That the loss of the same few samples falls, step by step at the highest learning rate.

    Falling is: the mean of the last three losses is below the first by more than rounding explains. Adam's
    first steps overshoot easily, so one step upward says nothing.
    """
    first, last = losses[0], sum(losses[-3:]) / len(losses[-3:])
    if last <= (1 - LEAST_FALL) * first:
        return []
    rises = not last <= (1 + LEAST_FALL) * first  # what is not finite rises
    factor = 0.1 if rises else 10
    how = "rises" if rises else "does not fall"
    return [
        Finding(
            "first_step.no_overfit",
            "critical" if rises else "warning",
            f"the loss of the same samples {how} over {len(losses) - 1} steps at the highest learning rate "
            f"{learning_rate:g}: from {first:.4f} to {last:.4f}",
            {"losses": list(losses), "learning_rate": learning_rate},
            f"set train.learning_rate to {learning_rate * factor:.2g}"
            + ("" if rises else ", or model.torch_dtype to float32 where updates round away"),
        )
    ]
