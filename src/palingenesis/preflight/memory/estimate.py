"""Estimate: what a step takes; Fit: whether that is there on a card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory.allocator import reserved
from palingenesis.preflight.memory.linear_attention import Linear
from palingenesis.preflight.memory.margin import Part, fixed_parts
from palingenesis.preflight.memory.model import describe_model
from palingenesis.preflight.memory.sharding import Sizes, sizes_of
from palingenesis.preflight.memory.step import Plan, do_step
from palingenesis.preflight.memory.trace import Trace, Use

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

#: Less headroom than this share of the card is called tight: evaluation, longer tokens of other libraries and
#: another process's context live in it.
TIGHT = 0.05


@dataclass(frozen=True)
class Estimate:
    """The memory of one optimizer step.

    Attributes:
        config: of the run.
        world_size: ranks.
        described: the model's own configuration.
        trace: of the step on one rank.
        sizes: of the parameters.
        model: name of the model's class.
        parameters: how many it has, adapters included, tied ones once.
        seconds: how long it took.
    """

    config: TrainConfig
    world_size: int
    described: Any
    trace: Trace
    sizes: Sizes
    model: str
    parameters: int
    seconds: float

    @property
    def strategy(self) -> str:
        return self.config.parallel.strategy

    @property
    def sharded(self) -> bool:
        """Whether the model is split over several ranks."""
        return self.strategy == "fsdp2" and self.world_size > 1

    @cached_property
    def use(self) -> Use:
        """Memory of one rank."""
        return self.trace.used()

    def on(self, gpu_bytes: int | None) -> Fit:
        """How this goes with a card's memory; ``None`` for what it would take without a limit."""
        parts = fixed_parts(self.config, self.described, self.sizes.held, self.world_size)
        fixed = sum(part.bytes for part in parts)
        room = float("inf") if gpu_bytes is None else gpu_bytes - fixed
        taken = reserved(self.trace, room, apart=self.sharded)
        suffices = taken is not None
        if taken is None:
            taken = reserved(self.trace, apart=self.sharded) or 0
        whole = max(taken, self.use.peak)
        allocator = Part(
            "allocator",
            whole - self.use.peak,
            "reserved beyond what is in use: the rules of PyTorch's CUDA allocator, applied to the traced "
            "allocations",
        )
        return Fit(self, gpu_bytes, (allocator, *parts), suffices)


@dataclass(frozen=True)
class Fit:
    """An estimate, held against a card.

    Attributes:
        estimate: of the step.
        gpu_bytes: of the card, if one is given.
        margin: what is added to the step's own peak.
        suffices: whether the allocator finds room for every allocation of the step.
    """

    estimate: Estimate
    gpu_bytes: int | None
    margin: tuple[Part, ...]
    suffices: bool

    @property
    def total(self) -> int:
        """Bytes that the card needs."""
        return self.estimate.use.peak + sum(part.bytes for part in self.margin)

    @property
    def headroom(self) -> int | None:
        """Bytes left over; negative where they are missing."""
        return None if self.gpu_bytes is None else self.gpu_bytes - self.total

    @property
    def fits(self) -> bool | None:
        return None if self.gpu_bytes is None else self.suffices

    @property
    def tight(self) -> bool:
        """Whether it fits with little to spare."""
        room = self.headroom
        return bool(self.fits) and room is not None and room < TIGHT * (self.gpu_bytes or 0)


def estimate_memory(
    config: TrainConfig,
    *,
    world_size: int = 1,
    on_cuda: bool = True,
    whole: bool = True,
    described: Any = None,
    linear: Linear | None = None,
) -> Estimate:
    """Trace one optimizer step of a configuration and measure it.

    Args:
        config: the run's. Data are not looked at: rows are as long as ``data.max_seq_length`` allows.
        world_size: ranks, over which ``parallel.strategy`` spreads the step.
        on_cuda: as on CUDA; else as on the CPU.
        whole: trace the step from its beginning; else only the micro-batches that can hold the peak, which
            is faster and has the same peak.
        described: the model's configuration, if it is known from an earlier estimate.
        linear: how layers of linear attention are computed; ``None``: on CUDA with kernels, else without.

    Raises:
        ConfigError: no such model, or the options cannot work.
    """
    sharded = config.parallel.strategy == "fsdp2"
    if sharded and world_size < 2:
        raise ConfigError(
            "parallel.strategy is fsdp2, and how much a rank holds depends on how many there are: give "
            "--world_size N, at least 2"
        )
    started = time.perf_counter()
    described = describe_model(config) if described is None else described
    linear = linear or (Linear.KERNELS if on_cuda else Linear.FALLBACK)
    plan = Plan(on_cuda=on_cuda, whole=whole, ranks=world_size, sharded=sharded, linear=linear)
    log, model = do_step(config, described, plan)
    return Estimate(
        config=config,
        world_size=world_size,
        described=described,
        trace=Trace.of(log.rows),
        sizes=sizes_of(model),
        model=_class_of(model),
        parameters=sum(one.numel() for one in model.parameters()),
        seconds=time.perf_counter() - started,
    )


def _class_of(model: Any) -> str:
    """The name of the model's class, without what adapters and FSDP2 put around it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = [kind for kind in type(inner).__mro__ if not kind.__name__.startswith("FSDP")]
    return kinds[0].__name__
