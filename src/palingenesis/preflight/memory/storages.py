"""StorageLog: every allocation and release below it, and what each was for.

It works on real tensors and on fake ones alike, so that an estimate can be held against the same step done
for real. What a kernel allocates and releases inside itself is not seen, but for the one thing that matters
on the CPU: copies of operands in another number format. Of tensors that are split over ranks it sees what
this rank holds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

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
#: The namespace of FSDP2's own operations.
_FSDP = "fsdp"


@dataclass
class _Held:
    """A storage that is alive. The reference tells of its end, and does not keep it."""

    number: int
    size: int
    category: Category
    reference: Any


def is_split(kind: type) -> bool:
    """Whether tensors of a type are split over ranks."""
    return kind.__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


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
        split: tensors may be split over ranks.
    """

    def __init__(
        self,
        rounding: int = 1,
        *,
        converts: bool = False,
        known: KnownValues | None = None,
        split: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[int, int, Category, Phase]] = []
        self.phase = Phase.SETUP
        self._rounding, self._converts, self._known, self._split = rounding, converts, known, split
        self._held: dict[int, _Held] = {}
        self._count = 0
        self._stack = ExitStack()

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
        for tensor in map(local, tensors):
            self._see(tensor, category)
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.category != category:
                self._become(held, category)

    def settle(self, before: Category, after: Category) -> None:
        """Whatever is the one and still there becomes the other."""
        for held in self._held.values():
            if held.category == before:
                self._become(held, after)

    def reserve(self, size: int, category: Category) -> None:
        """Log an allocation that nothing here makes, and that stays."""
        self._count += 1
        size = self._rounded(size)
        self.rows.append((self._count, size, category, self.phase))

    def __enter__(self) -> StorageLog:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self._split:
            self._stack.enter_context(self._seeing_resizes())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def _seeing_resizes(self) -> Iterator[None]:
        """FSDP2 frees and allocates whole weights by their storages, past every mode."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            held = self._held.get(storage._cdata)
            if held is not None:
                self._resize(held, self._rounded(size))

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked for by models at every turn
            return func(*args)
        kwargs = kwargs or {}
        if self._split and any(is_split(kind) for kind in types):
            return NotImplemented  # it is taken apart first, and comes back as what this rank does
        result = func(*args, **kwargs) if self._known is None else self._known.do(func, args, kwargs)
        category = _NEW[self.phase]
        if self.phase == Phase.BACKWARD and torch.is_grad_enabled():
            category = Category.ACTIVATIONS  # a checkpointed block, once more
        for one in tensors_in(result):
            self._see(one, category)
        if self._split and func.namespace == _FSDP:
            # The piece that shards are put into, then weights out of it; of gradients, the piece.
            if "out" in kwargs:
                self.mark(tensors_in(kwargs["out"]), Category.COMMUNICATION)
            else:
                self.mark(tensors_in(args[1]), Category.GATHERED)
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
        size = self._rounded(storage.nbytes())
        held = self._held.get(key)
        if held is not None:
            self._resize(held, size)
            return
        if not size:
            return
        self._count += 1
        reference = weakref.ref(storage, lambda _: self._end(key))
        self._held[key] = _Held(self._count, size, category, reference)
        self.rows.append((self._count, size, category, self.phase))

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding

    def _resize(self, held: _Held, size: int) -> None:
        if held.size == size:
            return
        if held.size:
            self.rows.append((held.number, -held.size, held.category, self.phase))
        held.size = size
        if size:
            self.rows.append((held.number, size, held.category, self.phase))

    def _become(self, held: _Held, category: Category) -> None:
        if held.size:
            self.rows.append((held.number, -held.size, held.category, self.phase))
            self.rows.append((held.number, held.size, category, self.phase))
        held.category = category

    def _end(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None and held.size:
            self.rows.append((held.number, -held.size, held.category, self.phase))
