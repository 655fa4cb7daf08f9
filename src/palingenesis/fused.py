"""Parameters that hold several projections in one tensor, and where their parts lie.

A query projection that dies inside a fused ``qkv`` barely moves the norm of the whole, so parts whose split
is known are watched apart. A layout that is not certain is not split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Part:
    """One part: ``length`` entries from ``start`` along ``dim``, after viewing the tensor as ``view``."""

    name: str
    dim: int
    start: int
    length: int
    view: tuple[int, ...] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that has the fused parameter's shape, without a copy."""
        viewed = tensor if self.view is None else tensor.view(self.view)
        return viewed.narrow(self.dim, self.start, self.length)


# Names under which query, key and value lie one after the other (GPT-2, Phi-3, ModernBERT, timm, Qwen-VL).
_QKV = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv"})
# Classes whose `query_key_value` holds the three interleaved head by head: [heads, 3, head_dim, …].
_QKV_PER_HEAD = frozenset({"GPTNeoXAttention", "BloomAttention"})
# Gate first, then up (Phi-3, GLM).
_GATE_UP = frozenset({"gate_up_proj"})


def parts_of(
    parent: nn.Module | None, child: str, module: nn.Module, name: str, parameter: torch.Tensor
) -> list[Part] | None:
    """The parts of a parameter, or ``None`` if it is not fused or not certainly so.

    Args:
        parent: the module that holds ``module`` (``None`` for the model itself).
        child: the name under which it does.
        module: the module that owns the parameter.
        name: the parameter's name in ``module``.
        parameter: the parameter.
    """
    if isinstance(module, nn.MultiheadAttention) and name in ("in_proj_weight", "in_proj_bias"):
        return _in_turn(("q", "k", "v"), [module.embed_dim] * 3, 0)
    # A linear map stores its outputs along dimension 0, the transposed one of GPT-2 along the last.
    transposed = type(module).__name__ == "Conv1D"
    if parent is None or name not in ("weight", "bias") or not (isinstance(module, nn.Linear) or transposed):
        return None
    dim = parameter.dim() - 1 if transposed else 0
    out = parameter.shape[dim]
    weight: torch.Tensor = module.weight
    into = weight.shape[0] if transposed else weight.shape[1]
    if child in _QKV:
        sizes = _head_sizes(parent, out) or ([out // 3] * 3 if out == 3 * into else None)
        return _in_turn(("q", "k", "v"), sizes, dim) if sizes else None
    if child in _GATE_UP and out % 2 == 0:
        return _in_turn(("gate", "up"), [out // 2] * 2, dim)
    heads = _attribute(parent, "num_attention_heads", "num_heads")
    if (
        child == "query_key_value"
        and type(parent).__name__ in _QKV_PER_HEAD
        and heads
        and out % (3 * heads) == 0
    ):
        view = (heads, 3, out // (3 * heads), *parameter.shape[1:])
        return [Part(part, 1, i, 1, view) for i, part in enumerate(("q", "k", "v"))]
    return None


def _in_turn(names: tuple[str, ...], sizes: list[int], dim: int) -> list[Part]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Part(name, dim, start, size) for name, start, size in zip(names, starts, sizes, strict=True)]


def _head_sizes(attention: nn.Module, out: int) -> list[int] | None:
    """Sizes of query, key and value under grouped-query attention, if they add up to ``out``."""
    heads = _attribute(attention, "num_attention_heads", "num_heads")
    groups = _attribute(attention, "num_key_value_heads") or heads
    width = _attribute(attention, "head_dim")
    if not (heads and groups and width) or (heads + 2 * groups) * width != out:
        return None
    return [heads * width, groups * width, groups * width]


def _attribute(module: nn.Module, *names: str) -> int | None:
    """The first whole number found under one of ``names``, in the module or in its ``config``."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None
