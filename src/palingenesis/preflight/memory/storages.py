"""StorageLog: every allocation and release below it, and what each was for.

It works on real tensors and on fake ones alike, so that an estimate can be held against the same step done
for real. What a kernel allocates and releases inside itself is not seen, but for the one thing that matters
on the CPU: copies of operands in another number format.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from palingenesis.preflight.memory.categories import Category, Phase
from palingenesis.preflight.memory.values import KnownValues, tensors_in

#: What a new storage is, by the part of the step that it is made in.
_NEW = {
    Phase.SETUP: Category.BACKWARD,
    Phase.FORWARD: Category.ACTIVATIONS,
    Phase.LOSS: Category.LOSS,
    Phase.BACKWARD: Category.BACKWARD,
    Phase.CLIPPING: Category.UPDATE,
    Phase.OPTIMIZER: Category.UPDATE,
}

_DEVICE = torch.ops.prim.device.default


@dataclass
class _Held:
    """A storage that is alive. The reference tells of its end, and does not keep it."""

    number: int
    size: int
    category: Category
    reference: Any


class StorageLog(TorchDispatchMode):
    """Logs allocations while it is entered.

    Attributes:
        rows: in order, ``(storage, bytes, category, phase)``: bytes are positive for an allocation, negative
            for a release; what becomes something else is released as the one and allocated as the other.
        phase: what is being done.

    Args:
        rounding: bytes to whose multiple an allocation is rounded up.
        converts: count the copies that kernels of the CPU make of operands in different number formats. Those
            of CUDA convert as they read.
        known: does the operations, where tensors are fake.
    """

    def __init__(
        self, rounding: int = 1, *, converts: bool = False, known: KnownValues | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[int, int, Category, Phase]] = []
        self.phase = Phase.SETUP
        self._rounding, self._converts, self._known = rounding, converts, known
        self._held: dict[int, _Held] = {}
        self._count = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The time in which a phase lasts."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def mark(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what storages are; those not seen before are allocated now."""
        for tensor in tensors:
            self._see(tensor, category)
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.category != category:
                self.rows.append((held.number, -held.size, held.category, self.phase))
                held.category = category
                self.rows.append((held.number, held.size, category, self.phase))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked for by models at every turn
            return func(*args)
        kwargs = kwargs or {}
        result = func(*args, **kwargs) if self._known is None else self._known.do(func, args, kwargs)
        category = _NEW[self.phase]
        if self.phase == Phase.BACKWARD and torch.is_grad_enabled():
            category = Category.ACTIVATIONS  # a checkpointed block, once more
        for one in tensors_in(result):
            self._see(one, category)
        if self._converts and torch.Tag.pointwise in func.tags:
            self._convert(args, result)
        return result

    def _convert(self, args: tuple[Any, ...], result: Any) -> None:
        """Copies that an elementwise kernel of the CPU makes of operands in other formats than its own."""
        operands = [one for one in tensors_in(args) if one.dim()]
        if len({one.dtype for one in operands}) < 2 or not isinstance(result, torch.Tensor):
            return
        common = functools.reduce(torch.promote_types, (one.dtype for one in operands))
        size = sum(one.numel() * common.itemsize for one in operands if one.dtype != common)
        if result.dtype != common and result.is_floating_point():
            size += result.numel() * common.itemsize
        self._count += 1
        self.rows.append((self._count, size, _NEW[self.phase], self.phase))
        self.rows.append((self._count, -size, _NEW[self.phase], self.phase))

    def _see(self, tensor: torch.Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        held = self._held.get(key)
        if held is not None:
            if held.size != size:  # resized in place
                self.rows.append((held.number, -held.size, held.category, self.phase))
                held.size = size
                self.rows.append((held.number, size, held.category, self.phase))
            return
        if not size:
            return
        self._count += 1
        reference = weakref.ref(storage, lambda _: self._end(key))
        self._held[key] = _Held(self._count, size, category, reference)
        self.rows.append((self._count, size, category, self.phase))

    def _end(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.rows.append((held.number, -held.size, held.category, self.phase))
