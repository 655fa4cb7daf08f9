"""Symptoms of the machine: memory that runs out, devices that wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import median, trend

_USED = "health/cuda_utilization_pct"
_ALLOCATED = {"health/cuda_allocated_gb": "on the device", "health/host_rss_gb": "of the process"}
_PERCENT = 100
_OUT_OF_MEMORY = ("outofmemory", "out of memory", "cudamalloc", "alloc_failed")


def memory_pressure(case: Case) -> Finding | None:
    used = case.series(f"{_USED}_max") or case.series(_USED)
    error = case.source.error
    ran_out = ran_out_of_memory(error)
    tight = bool(used) and float(np.median(used.value)) > case.limits.memory_pct
    if not (ran_out or tight):
        return None
    told = "the run ended because memory ran out" if ran_out else "the device's memory is nearly full"
    share = f" ({np.median(used.value):.0f}% in use)" if used else ""
    return Finding(
        "run.memory_pressure",
        "critical" if ran_out else "warning",
        f"{told}{share}",
        {"used_pct": float(np.median(used.value)) if used else None, "error": error[:200] or None},
        "train.per_device_batch_size: half, with train.gradient_accumulation_steps twice as many; "
        "train.gradient_checkpointing: true; memory.loss_num_chunks: twice as many (pgs profile says what is "
        "enough)",
        since=None if ran_out or not used else int(used.step[0]),
        confidence=case.limits.certain if ran_out else None,
    )


def ran_out_of_memory(error: str) -> bool:
    """Whether an error's words say that there was no memory left."""
    return any(word in error.lower() for word in _OUT_OF_MEMORY)


def memory_grows(case: Case) -> Finding | None:
    """Memory that goes up and up, and when there will be none left."""
    limits = case.limits
    for name, where in _ALLOCATED.items():
        held = case.series(name).second_half
        line = trend(held.step, held.value, limits.alpha)
        if len(held.value) < limits.memory_looks or not line.least > limits.memory_growth * line.middle:
            continue
        full = _full_at(case, name, line.slope)
        when = "" if full is None else f"; at this pace none is left at step {full}"
        return Finding(
            "run.memory_grows",
            "warning",
            f"memory {where} grew from {line.middle - line.change / 2:.3g} to "
            f"{line.middle + line.change / 2:.3g} GB over the second half of the run{when}",
            {"metric": name, "gb_a_step": line.slope, "growth_gb": line.change, "full_at_step": full},
            "keep no tensor that hangs on the graph: loss.item() or loss.detach() in lists and averages; "
            "data.num_workers: 0 shows whether it is the loaders",
            since=int(held.step[0]),
        )
    return None


def _full_at(case: Case, name: str, slope: float) -> int | None:
    """The step at which a device will be full, as its share in use goes up with what is held."""
    used, held = case.series(_USED), case.series(name)
    if not name.startswith("health/cuda") or not used or used.value[-1] <= 0:
        return None
    left = held.value[-1] * (_PERCENT / used.value[-1] - 1)
    return int(held.step[-1] + left / slope)


def slow_throughput(case: Case) -> Finding | None:
    """A device that mostly waits, a speed that falls, or steps that stall for no length of theirs."""
    seen: list[str] = []
    evidence: dict[str, Any] = {}
    fixes: list[str] = []
    _waits(case, seen, evidence, fixes)
    _slows_down(case, seen, evidence, fixes)
    _stalls(case, seen, evidence, fixes)
    if not seen:
        return _unused(case)
    return Finding(
        "run.slow_throughput",
        "warning",
        "; ".join(seen),
        evidence,
        "; ".join(dict.fromkeys(fixes)),
        since=_slow_since(case, evidence),
    )


def _unused(case: Case) -> Finding | None:
    """Memory that stays free: nothing is wrong, and a larger batch would likely be faster."""
    used = case.series(f"{_USED}_max") or case.series(_USED)
    middle = median(used.value, case.limits.alpha)
    if not middle.high < case.limits.memory_unused:
        return None
    return Finding(
        "run.slow_throughput",
        "info",
        f"{middle.value:.0f}% of the device's memory is in use: a larger batch would likely be faster",
        {"memory_used_pct": middle.value},
        "train.per_device_batch_size: twice, train.gradient_accumulation_steps: half",
        since=int(used.step[0]),
        confidence=case.limits.shared,
    )


def _slow_since(case: Case, evidence: dict[str, Any]) -> int | None:
    """Where it began: at the first stall, or where most readings are slow."""
    if evidence.get("stalled_steps"):
        return int(evidence["stalled_steps"][0])
    speed = case.series("train/tokens_per_sec")
    if "fall" not in evidence:
        first = case.series("train/mfu") or speed
        return int(first.step[0])
    slow = evidence["tokens_per_sec"]
    return case.first_beyond(speed, lambda one: one.value < slow)


def _waits(case: Case, seen: list[str], evidence: dict[str, Any], fixes: list[str]) -> None:
    share = case.series("train/mfu").value[case.limits.warmup_rows :]
    share = share[share > 0]  # where it is not known yet some write a negative one
    if len(share) and np.median(share) > 1:
        share = share / _PERCENT
    middle = median(share, case.limits.alpha)
    if not middle.high < case.limits.mfu:
        return
    seen.append(f"{middle.value:.1%} of the device's peak is used")
    evidence["mfu"] = middle.value
    fixes.append("model.compile: true")
    used = case.series(_USED)
    if used:
        evidence["memory_used_pct"] = float(np.median(used.value))
    if not used or np.median(used.value) < case.limits.memory_pct / 2:
        fixes.append("train.per_device_batch_size: twice as many")


def _slows_down(case: Case, seen: list[str], evidence: dict[str, Any], fixes: list[str]) -> None:
    speed = case.series("train/tokens_per_sec")
    step, value = speed.step[case.limits.warmup_rows :], speed.value[case.limits.warmup_rows :]
    line = trend(step, value, case.limits.alpha)
    if not line.most < -case.limits.throughput_fall * line.middle:
        return
    # A line through noisy values may end below zero; what was read does not.
    part = min(len(value), max(case.limits.warmup_rows, len(value) // 10))
    before, after = float(np.median(value[:part])), float(np.median(value[-part:]))
    seen.append(f"tokens per second fell from {before:.4g} to {after:.4g} over the run")
    evidence |= {"tokens_per_sec": line.middle, "fall": -line.change}
    fixes.append("look for what grows: health/host_rss_gb, losses kept on the graph, the heat of a device")


def _stalls(case: Case, seen: list[str], evidence: dict[str, Any], fixes: list[str]) -> None:
    seconds, speed = case.series("train/step_time_s"), case.series("train/tokens_per_sec")
    steps, at, where = np.intersect1d(seconds.step, speed.step, return_indices=True)
    first = case.limits.warmup_rows
    steps, took, rate = steps[first:], seconds.value[at][first:], speed.value[where][first:]
    if len(took) < 4 * first:
        return
    usual, usual_rate = float(np.median(took)), float(np.median(rate))
    # A step that takes long because it has many tokens is no stall.
    stalled = (took > case.limits.stall * usual) & (rate < usual_rate / 2)
    lost = float((took - usual)[stalled].sum() / took.sum())
    if lost <= case.limits.stall_share:
        return
    seen.append(f"{int(stalled.sum())} steps stalled and cost {lost:.0%} of the time")
    evidence |= {"stalled_steps": steps[stalled].astype(int).tolist(), "share_of_time": lost}
    fixes.append("data.num_workers: 4")
