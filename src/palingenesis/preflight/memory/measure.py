"""The same step done for real, and its peak measured by what allocates: what an estimate is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from palingenesis.preflight.memory.step import Plan, do_step
from palingenesis.preflight.memory.trace import Trace, Use

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig


def peak_on_cpu(config: TrainConfig, described: Any, *, ranks: int = 1) -> int:
    """The most bytes that PyTorch's allocator had handed out, of all that it did for the step.

    PyTorch's profiler reports every allocation, those inside kernels included. The set-up counts too: it ends
    with an optimizer's step, which takes no more than that of the step itself.

    Args:
        config: the run's.
        described: the model's configuration.
        ranks: of which this process is one, and each of them calls this; or this one alone, and the others
            are made up, so that nothing is exchanged and no library's copies for that are counted.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        do_step(config, described, _plan(config, ranks))
    inner: Any = profiler.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most


def _plan(config: TrainConfig, ranks: int) -> Plan:
    sharded = ranks > 1 and config.parallel.strategy == "fsdp2"
    return Plan(on_cuda=False, real="cpu", ranks=ranks, sharded=sharded)


def peak_by_log(config: TrainConfig, described: Any, *, ranks: int = 1) -> Use:
    """The memory of the same step done for real, by the log that an estimate is made with."""
    log, _ = do_step(config, described, _plan(config, ranks))
    return Trace.of(log.rows).used()


def peak_on_cuda(config: TrainConfig, described: Any, device: str = "cuda") -> dict[str, int]:
    """The step's peak on a card, and what is taken beside it, in bytes.

    Returns:
        ``allocated`` and ``reserved`` by PyTorch at their most in the step, and ``outside``: what this
        process holds on the card beside what PyTorch reserved.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)

    def begins() -> None:
        torch.cuda.reset_peak_memory_stats(device)

    do_step(config, described, Plan(real=device), begins=begins)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "outside": total - free - torch.cuda.memory_reserved(device),
    }
