"""Batches: what the last steps were trained on, by reference, to be told when a loss spikes.

Ordinary steps cost a few entries in a list: no tensor is read, copied or moved. Only when a ``loss_spike`` or
a ``nonfinite`` event names a step are its tensors read, and a file is written into ``spikes/``. They are held
until their step has been judged, and no more of them than ``spike_memory_mb``: the oldest are let go first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from palingenesis.batch_samples import Place, micro_batch
from palingenesis.config import MonitorConfig
from palingenesis.describe import rank_and_world_size
from palingenesis.events import Event
from palingenesis.interval import one_number
from palingenesis.record.format import NON_FINITE, utc_now
from palingenesis.record.spikes import MicroBatch, Spike, write_spike

log = logging.getLogger("palingenesis")

#: Events that make someone ask what was in the batch.
ASKING = frozenset({"loss_spike", "nonfinite"})

#: Finds the samples of micro-batches in the data set, by the key that each was noted with; ``None`` for one
#: that cannot be found.
Locate = Callable[[Sequence[Hashable]], Sequence[Sequence[Place] | None]]

_MIB = 1 << 20
#: Steps are held for so many checks at most.
_MOST_CHECKS = 4
#: A tensor larger than this part of what may be held is not: it would push out all others.
_LARGEST_PART = 4
_LET_GO = "the tensors of some micro-batches were let go before the step was judged (spike_memory_mb)"
_CHANGED = "tensors that were changed in place after the step are left out"


@dataclass
class Held:
    """One micro-batch, by reference.

    Attributes:
        tensors: by name, each with its version when it was noted.
        others: lists of one entry a sample, by name.
        shapes: of all tensors.
        key: what ``Locate`` finds it by.
        indices: places in the data set, where they were given.
        loss: of the micro-batch.
        size: bytes of the tensors.
    """

    tensors: dict[str, tuple[torch.Tensor, int]]
    others: dict[str, Sequence[Any]]
    shapes: dict[str, tuple[int, ...]]
    key: Hashable = None
    indices: Sequence[int] | None = None
    loss: torch.Tensor | float | None = None
    size: int = 0

    def let_go(self) -> int:
        """Drop the tensors; how many bytes that was."""
        size, self.size, self.tensors = self.size, 0, {}
        return size


@dataclass
class Batches:
    """The micro-batches of the steps that are not judged yet.

    Args:
        config: how much is held, and told.
        folder: the run's; ``None`` keeps nothing.
    """

    config: MonitorConfig
    folder: Path | None
    #: Set by whoever knows: where samples are in the data set, the fingerprint of a step's samples, and what
    #: makes text of tokens.
    locate: Locate | None = None
    fingerprint: Callable[[int], str | None] | None = None
    tokenizer: Any = None
    _open: list[Held] = field(default_factory=list)
    _steps: dict[int, list[Held]] = field(default_factory=dict)
    _bytes: int = 0
    _written: int = 0

    @property
    def wanted(self) -> bool:
        """Whether anything is kept at all."""
        return self.folder is not None and self._written < self.config.spike_files

    # -- ordinary steps ----------------------------------------------------------------------------------

    def note(self, batch: object, *, indices: Sequence[int] | None = None, key: Hashable = None) -> None:
        """Hold on to a micro-batch of the coming step.

        Args:
            batch: a mapping, a sequence or one tensor.
            indices: where its samples are in the data set.
            key: what :attr:`locate` finds it by.
        """
        if not self.wanted:
            return
        held = Held({}, {}, {}, key, indices)
        for name, value in _entries(batch):
            self._hold(held, name, value)
        self._open.append(held)
        self._bytes += held.size
        self._bound()

    def _hold(self, held: Held, name: str, value: object) -> None:
        # DTensors, nested ones and the like cannot be read by one rank alone, or not row by row.
        if type(value) is torch.Tensor and value.layout is torch.strided:
            held.shapes[name] = tuple(value.shape)
            size = value.numel() * value.element_size()
            if size <= self._limit // _LARGEST_PART:
                kept = value.detach() if value.requires_grad else value
                held.tensors[name] = (kept, _version(kept))
                held.size += size
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, int, float)):
            held.others[name] = value

    def note_loss(self, loss: object) -> None:
        """The loss of the micro-batch noted last."""
        if self._open and isinstance(loss, (torch.Tensor, float, int)):
            on_graph = isinstance(loss, torch.Tensor) and loss.requires_grad
            self._open[-1].loss = loss.detach() if on_graph else loss  # type: ignore[union-attr]

    def forget_open(self) -> None:
        """The step under way begins anew."""
        self._bytes -= sum(held.size for held in self._open)
        self._open = []

    def end_step(self, step: int) -> None:
        """What was noted since the last call is of this step."""
        if self._open:
            self._steps[step], self._open = self._open, []
            # Where checks fail, nothing is judged.
            self.judged(step - _MOST_CHECKS * self.config.check_every)

    def judged(self, step: int) -> None:
        """Every step up to this one has been judged; the last one is kept as what came before the next."""
        while self._steps and (first := next(iter(self._steps))) < step:
            self._bytes -= sum(held.size for held in self._steps.pop(first))

    def clear(self) -> None:
        """Let go of everything: the run has ended, or goes on from another step."""
        self._open, self._steps, self._bytes = [], {}, 0

    @property
    def _limit(self) -> int:
        return self.config.spike_memory_mb * _MIB

    def _bound(self) -> None:
        if self._bytes <= self._limit:
            return
        for held in [*(held for step in self._steps.values() for held in step), *self._open]:
            self._bytes -= held.let_go()
            if self._bytes <= self._limit:
                return

    # -- a spike -----------------------------------------------------------------------------------------

    def told(self, event: Event) -> None:
        """Write down the batch of an event that asks for it."""
        if self.folder is None or not self.wanted or event.event not in ASKING:
            return
        spike = self.describe(event)
        if spike is None:
            return
        try:
            write_spike(self.folder, spike)
        except OSError as error:
            log.warning("the batch of step %d was not kept: %s", event.step, error.strerror or error)
            return
        self._written += 1

    def describe(self, event: Event) -> Spike | None:
        """The batches of an event's step and of the step before; ``None`` if nothing was noted of either."""
        now, before = self._steps.get(event.step, []), self._steps.get(event.step - 1, [])
        if not (now or before):
            return None
        notes: dict[str, None] = {}
        places = self._places([*before, *now], notes)
        made = [self._made(held, found, notes) for held, found in zip([*before, *now], places, strict=True)]
        rank, ranks = rank_and_world_size()
        return Spike(
            step=event.step,
            event=event.event,
            severity=event.severity,
            message=event.message,
            loss=_loss(event.value),
            baseline=event.baseline,
            time=utc_now(),
            rank=rank,
            ranks=ranks,
            batch=self._fingerprint(event.step),
            microbatches=tuple(made[len(before) :]),
            before=tuple(made[: len(before)]),
            notes=tuple(notes),
        )

    def _places(self, held: list[Held], notes: dict[str, None]) -> Sequence[Sequence[Place] | None]:
        given = [None if one.indices is None else [Place(index) for index in one.indices] for one in held]
        if self.locate is None:
            return given
        try:
            found = self.locate([one.key for one in held])
        except Exception as error:  # noqa: BLE001 - data sets are anyone's code; what the tensors tell remains
            notes[f"samples could not be looked up in the data set: {type(error).__name__}: {error}"] = None
            return given
        return [one or other for one, other in zip(given, found, strict=True)]

    def _fingerprint(self, step: int) -> str | None:
        try:
            return None if self.fingerprint is None else self.fingerprint(step)
        except Exception:  # noqa: BLE001 - as above, where it is noted
            return None

    def _made(self, held: Held, places: Sequence[Place] | None, notes: dict[str, None]) -> MicroBatch:
        tensors = {
            name: tensor.to("cpu")
            for name, (tensor, version) in held.tensors.items()
            if _version(tensor) == version
        }
        if len(tensors) < len(held.tensors):
            notes[_CHANGED] = None
        if held.shapes and not held.tensors:
            notes[_LET_GO] = None
        made, doubt = micro_batch(tensors, held.others, places, self.config, self.tokenizer)
        if doubt is not None:
            notes[doubt] = None
        loss = held.loss
        if isinstance(loss, torch.Tensor):
            loss = one_number(loss)
        return MicroBatch(made.samples, None if loss is None else float(loss), made.left_out, held.shapes)


def _entries(batch: object) -> Iterator[tuple[str, object]]:
    if isinstance(batch, Mapping):
        yield from ((str(name), value) for name, value in batch.items())
    elif isinstance(batch, (list, tuple)):
        yield from ((str(number), value) for number, value in enumerate(batch))
    else:
        yield "0", batch


def _version(tensor: torch.Tensor) -> int:
    """Counts changes in place; made without gradients for good, a tensor does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _loss(value: object) -> float | None:
    """The loss of an event: a number, or the word for one that is not finite."""
    if isinstance(value, str):
        return NON_FINITE.get(value, math.nan)
    return float(value) if isinstance(value, (int, float)) else None
