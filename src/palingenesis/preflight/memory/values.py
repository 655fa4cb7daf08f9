"""KnownValues: under fake tensors, the values of what is small and computed from what is known.

A fake tensor has a shape and no values, and yet a step asks for some: which positions bear loss, whether any
token is padding, how many steps the optimizer has done. Those follow from the batch and from constants alone.
They are computed beside the fake tensors, on real ones, so that the step takes the same way as for real.
Nothing that comes out of weights has a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

#: Most elements of a tensor whose values are kept. Longer rows than this are no batch.
MOST = 2**22

_aten = torch.ops.aten
_READ = {_aten._local_scalar_dense.default, _aten.equal.default}
_GROUPED = getattr(getattr(_aten, "_grouped_mm", None), "default", None)
_SHAPED = {_aten.nonzero.default, _aten.repeat_interleave.Tensor, _aten.masked_select.default}


class UnknownValueError(RuntimeError):
    """The model decides by a value that only real weights would give."""


class KnownValues:
    """Does operations under a ``FakeTensorMode``, and keeps values.

    Not a mode of its own, because every mode costs each operation a round through the dispatcher.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._known: Any = WeakIdKeyDictionary()

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor of which everything is known."""
        with _disable_current_modes():
            fake: torch.Tensor = self._fake_mode.from_tensor(real)
        self._known[fake] = real
        return fake

    def do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on fake tensors, and on what is known of them.

        Raises:
            UnknownValueError: it asks for a value that is not known.
        """
        given = [*tensors_in(args), *tensors_in(kwargs)]
        known = all(self._value(one) is not None for one in given)
        if func in _READ or func in _SHAPED:
            if not known:
                raise UnknownValueError(str(func))
            real = self._really(func, args, kwargs)
            return real if func in _READ else self.tensor(real)
        result = _grouped(*args) if func is _GROUPED else func(*args, **kwargs)
        found = list(tensors_in(result))
        if known and self._worth(func, found or given):
            real = self._really(func, args, kwargs)
            for one, value in zip(found, tensors_in(real), strict=True):
                self._known[one] = value
        elif self._known:
            for one in found or given:
                self._known.pop(one, None)  # written in place with what is not known
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= MOST else None
        value: torch.Tensor | None = self._known.get(tensor)
        return value

    @staticmethod
    def _worth(func: Any, found: list[torch.Tensor]) -> bool:
        """Whole numbers, truth values and single numbers decide things; large tables and noise do not."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return all(one.numel() <= MOST and (not one.is_floating_point() or one.numel() <= 1) for one in found)

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(one: Any) -> Any:
            return self._value(one) if isinstance(one, torch.Tensor) else one

        with _disable_current_modes(), torch.no_grad():
            return func(*tree_map(real, args), **tree_map(real, kwargs))


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The result of a product by groups; PyTorch's own description of it knows bf16 alone."""
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], *shape)
    elif a.dim() == 2 and b.dim() == 2 and offsets is not None:
        shape = (offsets.shape[0], *shape)
    return torch.empty(shape, dtype=a.dtype, device=a.device)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an operation takes or gives: lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
