"""What would make a run fit: options to change, cheapest first, each estimated anew by tracing it."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory.estimate import Estimate, Fit, estimate_memory
from palingenesis.preflight.memory.linear_attention import Linear, linear_layers
from palingenesis.sft.config import TrainConfig

#: A change that saves a smaller share than this is not worth a line.
_LEAST_SAVED = 0.01
_MOST_CHUNKS = 64
_MOST_RANKS = 64
_RANK = 16


@dataclass(frozen=True)
class Change:
    """A configuration that differs from the one given.

    Attributes:
        options: what to set.
        cost: what it costs the run.
        world_size: ranks, where that is changed.
    """

    options: Mapping[str, Any]
    cost: str
    world_size: int | None = None

    @property
    def words(self) -> str:
        """As it is typed: ``--memory.loss_num_chunks 16``."""
        typed = [f"--{name} {_text(value)}" for name, value in self.options.items()]
        if self.world_size is not None:
            typed.append(f"on {self.world_size} GPUs")
        return " ".join(typed)

    def applied(self, config: TrainConfig) -> TrainConfig:
        """The configuration with it."""
        settings = config.model_dump()
        for name, value in self.options.items():
            section, option, *inner = name.split(".")
            if inner:
                settings[section][option] = {**(settings[section][option] or {}), inner[0]: value}
            else:
                settings[section][option] = value
        return TrainConfig(**settings)

    def __add__(self, other: Change) -> Change:
        return Change(
            {**self.options, **other.options},
            f"{self.cost}; {other.cost}",
            other.world_size or self.world_size,
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Tried:
    """A change, and what a step takes with it."""

    change: Change
    fit: Fit

    @property
    def fits(self) -> bool:
        return bool(self.fit.fits)


@dataclass
class Budget:
    """Seconds for traces that may be left out; each is expected to take as long as the last."""

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    left_out: list[str] = field(default_factory=list)
    """What there was no time for, in words."""
    _started: float = field(init=False)
    _last: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def spent(self) -> bool:
        """Whether another trace would take longer than there is."""
        return self.clock() - self._started + self._last > self.seconds

    def took(self, seconds: float) -> None:
        """Say how long a trace took."""
        self._last = seconds


def what_would_fit(fit: Fit, budget: Budget) -> list[Tried]:
    """Changes, cheapest first, as far as the budget goes.

    First those that change no result, each alone and then together, up to the first that fits. Then those
    that do, each alone: they are alternatives, so one that fits does not end the search; of several numbers
    of cards the smallest that fits is enough. If nothing fits yet, each of them with all of the former.
    """
    assert fit.gpu_bytes is not None
    estimate = fit.estimate
    free = list(free_changes(estimate.config))
    together = functools.reduce(operator.add, free) if free else None
    found: list[Tried] = []
    for change in [*free, *([together] if together is not None and len(free) > 1 else [])]:
        _try(change, fit, budget, found)
        if _any_fits(found):
            return found
    rest = list(dear_changes(estimate))
    _alternatives(rest, fit, budget, found)
    if together is not None and not _any_fits(found) and not budget.spent:
        _alternatives([together + each for each in rest], fit, budget, found)
    return found


def without_kernels(fit: Fit, budget: Budget) -> Fit | None:
    """What the step takes where the kernels of linear attention are not installed.

    ``None`` for a model without such layers, for packed rows, which transformers then refuses, and if there
    is no time for it.
    """
    estimate = fit.estimate
    if not linear_layers(estimate.described) or estimate.config.data.packing:
        return None
    if budget.spent:
        budget.left_out.append("the step without kernels for linear attention")
        return None
    made = estimate_memory(
        estimate.config,
        world_size=estimate.world_size,
        whole=False,
        described=estimate.described,
        linear=Linear.FALLBACK,
    )
    return made.on(fit.gpu_bytes)


def _alternatives(changes: list[Change], fit: Fit, budget: Budget, found: list[Tried]) -> None:
    enough_cards = False
    for change in changes:
        if enough_cards and change.world_size is not None:
            continue
        tried = _try(change, fit, budget, found)
        enough_cards = enough_cards or (tried is not None and tried.fits and change.world_size is not None)


def _any_fits(found: list[Tried]) -> bool:
    return any(one.fits for one in found)


def _try(change: Change, fit: Fit, budget: Budget, found: list[Tried]) -> Tried | None:
    """Trace a change and keep it, unless it saves nothing, cannot be made, or there is no time for it."""
    if budget.spent:
        budget.left_out.append(change.words)
        return None
    estimate = fit.estimate
    try:
        made = estimate_memory(
            change.applied(estimate.config),
            world_size=change.world_size or estimate.world_size,
            whole=False,
            described=estimate.described,
        )
    except ConfigError:  # a model without checkpointing, a layer that takes no adapter: no way out
        return None
    budget.took(made.seconds)
    tried = Tried(change, made.on(fit.gpu_bytes))
    # Where the peak is, some options change nothing.
    if tried.fits or tried.fit.total < fit.total * (1 - _LEAST_SAVED):
        found.append(tried)
    return tried


def free_changes(config: TrainConfig) -> Iterator[Change]:
    """Those that leave every number of the run as it is."""
    memory, train = config.memory, config.train
    if not memory.chunked_loss:
        yield Change({"memory.chunked_loss": True}, "no time worth speaking of")
    chunks = memory.loss_num_chunks if memory.chunked_loss else 8
    if chunks < _MOST_CHUNKS:
        options = {} if memory.chunked_loss else {"memory.chunked_loss": True}
        yield Change({**options, "memory.loss_num_chunks": _MOST_CHUNKS}, "no time worth speaking of")
    rows, accumulated = train.per_device_batch_size, train.gradient_accumulation_steps
    if rows > 1:
        yield Change(
            {
                "train.per_device_batch_size": 1,
                "train.gradient_accumulation_steps": rows * accumulated,
            },
            "time, where one row does not keep the card busy; the batch of a step is the same",
        )
    if not train.gradient_checkpointing:
        yield Change({"train.gradient_checkpointing": True}, "a second forward pass: about a third more time")


def dear_changes(estimate: Estimate) -> Iterator[Change]:
    """Those that change the run's numbers, or need more cards."""
    config = estimate.config
    if config.train.optimizer == "adamw":
        yield Change({"train.optimizer": "adamw_8bit"}, "moments of a byte: slightly other updates")
    if config.model.lora is None and config.parallel.strategy != "fsdp2":
        yield Change({"model.lora.rank": _RANK}, "low-rank adapters are trained in place of the weights")
    if config.model.lora is None:
        ranks = max(estimate.world_size, 1)
        while ranks < _MOST_RANKS:
            ranks *= 2
            options = {"parallel.strategy": "fsdp2"}
            yield Change(options, f"{ranks} cards, and communication between them", ranks)
            if ranks >= 8 * max(estimate.world_size, 1):
                break
