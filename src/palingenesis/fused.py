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


# Whose classes are known to keep query, key and value one after the other under the names below: Hugging
# Face's (GPT-2, Phi-3, ModernBERT, DBRX, MPT, the vision towers) and timm's plain attention. The same names
# in other people's classes are as often split head by head, so a name alone proves nothing.
_KNOWN = (
    "transformers.models.",
    "timm.layers.attention",
    "timm.models.vision_transformer",
    "timm.models.swin_transformer",
)
_QKV = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv"})
# nanoGPT's attention, copied into many code bases under its own name.
_QKV_BY_CLASS = frozenset({("CausalSelfAttention", "c_attn")})
# Classes that hold the three interleaved head by head: [heads, 3, head_dim, …].
_QKV_PER_HEAD = frozenset(
    {
        ("GPTNeoXAttention", "query_key_value"),
        ("GPTNeoXJapaneseAttention", "query_key_value"),
        ("BloomAttention", "query_key_value"),
        ("PersimmonAttention", "query_key_value"),
        ("MiniMaxLightningAttention", "qkv_proj"),
    }
)
# Gate first, then up (Phi-3, GLM, Dia, …).
_GATE_UP = frozenset({"gate_up_proj"})
# Known, and laid out in yet another way: never split.
_ODD = frozenset({"CodeGenAttention", "GPTBigCodeAttention", "Phi4MultimodalAudioMLP"})


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
    if hasattr(module, "parametrizations"):
        return None  # the weight is made of other tensors, which have no such parts
    if isinstance(module, nn.MultiheadAttention) and name in ("in_proj_weight", "in_proj_bias"):
        return _in_turn(("q", "k", "v"), [module.embed_dim] * 3, 0)
    # A linear map stores its outputs along dimension 0, the transposed one of GPT-2 along the last.
    transposed = type(module).__name__ == "Conv1D"
    if parent is None or name not in ("weight", "bias") or not (isinstance(module, nn.Linear) or transposed):
        return None
    dim = parameter.dim() - 1 if transposed else 0
    out = parameter.shape[dim]
    # Not the weight's own shape: reading a parametrized weight computes it, which may change its buffers.
    into = _attribute(module, "in_features", "nx")
    kind = (type(parent).__name__, child)
    heads = _attribute(parent, "num_attention_heads", "num_heads")
    if kind in _QKV_PER_HEAD:
        if not heads or out % (3 * heads):
            return None
        view = (heads, 3, out // (3 * heads), *parameter.shape[1:])
        return [Part(part, 1, i, 1, view) for i, part in enumerate(("q", "k", "v"))]
    known = type(parent).__module__.startswith(_KNOWN) and kind[0] not in _ODD
    if kind in _QKV_BY_CLASS or (known and child in _QKV):
        sizes = _head_sizes(parent, out) or ([out // 3] * 3 if into and out == 3 * into else None)
        return _in_turn(("q", "k", "v"), sizes, dim) if sizes else None
    if known and child in _GATE_UP and out % 2 == 0:
        return _in_turn(("gate", "up"), [out // 2] * 2, dim)
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
