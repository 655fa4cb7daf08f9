"""Entropies of chosen positions, from whatever a model leaves: logits, or hidden states and the LM head.

Only the rows that were chosen are ever touched: logits are gathered before they are converted, and the head
is applied to the gathered hidden states. Where the vocabulary is split over processes (tensor parallelism)
each works on its own part, and two small reductions a row join them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from palingenesis.layers import is_sharded

# Below the largest logit of a row by this much a probability is zero in fp32, and nothing in fp64.
_NOTHING = 1000.0

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class NotAvailable(Exception):
    """Why an entropy cannot be had from what was given, in words."""


@dataclass(frozen=True)
class Logits:
    """Logits that exist: ``[..., V]``, whole or split along the vocabulary."""

    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the positions."""
        return self.values.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def entropies(self, at: torch.Tensor) -> torch.Tensor:
        """Entropy in nats at flat positions ``at`` (``[n]``); ``[n]``, fp32 (fp64 of fp64 logits)."""
        if not self.values.is_floating_point():
            raise NotAvailable(f"the logits are {self.values.dtype}, not floating point")
        if not is_sharded(self.values):
            return _entropies(_rows(self.values, at), ())
        local, groups = _vocabulary_shard(self.values)
        return _entropies(_rows(local, at), groups)


@dataclass(frozen=True)
class Head:
    """Logits that were never formed: ``soft_cap · tanh(scale · (hidden @ weightᵀ + bias) / soft_cap)``.

    ``hidden`` is ``[..., D]``, ``weight`` ``[V, D]``, ``bias`` ``[V]``. Without a ``soft_cap`` nothing is
    capped.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    soft_cap: float | None

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        head: nn.Module | torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        soft_cap: float | None,
    ) -> Head:
        """From a plain ``nn.Linear``, or a weight and perhaps a bias.

        Raises:
            NotAvailable: what the head computes cannot be told from its weight.
        """
        if isinstance(head, nn.Module):
            linear = _plain_linear(head)
            weight, bias = linear.weight, linear.bias
        else:
            weight = head
        if weight.is_meta or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise NotAvailable(
                f"the LM head's weight is {list(weight.shape)} on {weight.device} where hidden states of "
                f"size {hidden.shape[-1]} need [vocabulary, {hidden.shape[-1]}]: it is not gathered here"
            )
        if weight.dtype not in _FLOATS or hidden.dtype not in _FLOATS:
            raise NotAvailable(f"the LM head is {weight.dtype} and its input {hidden.dtype}")
        if weight.device.type != hidden.device.type:
            raise NotAvailable(f"the LM head is on {weight.device}, its input on {hidden.device}")
        return cls(hidden, weight, bias, scale, soft_cap)

    @property
    def shape(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def entropies(self, at: torch.Tensor) -> torch.Tensor:
        """As :meth:`Logits.entropies`."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        groups: tuple[Any, ...] = ()
        if is_sharded(weight):
            groups = _head_groups(weight, hidden)
            bias = None if bias is None else _local_bias(bias, weight)
        hidden, weight = plain_tensor(hidden, "hidden states"), local_part(weight)
        rows = _rows(hidden, at).to(weight.device, weight.dtype, non_blocking=True)
        # Under autocast the whole weight would be converted, for a few rows.
        with torch.autocast(weight.device.type, enabled=False):
            logits = functional.linear(rows, weight, None if bias is None else bias.to(weight.dtype))
        logits = _wide(logits)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return _entropies(logits, groups).to(at.device, non_blocking=True)


def _plain_linear(head: nn.Module) -> nn.Linear:
    kind = type(head).__name__
    if not isinstance(head, nn.Linear) or _own_forward(head):
        raise NotAvailable(
            f"the LM head is a {kind}, whose output cannot be told from its weight: "
            "pass the weight that takes effect as `head`"
        )
    # Those of a sharded head gather it or lay out its output.
    hooked = head._forward_hooks or head._forward_pre_hooks
    if hooked and not is_sharded(head.weight):
        raise NotAvailable(f"the LM head ({kind}) has forward hooks, which may change what it computes")
    return head


def _own_forward(head: nn.Linear) -> bool:
    return type(head).forward is not nn.Linear.forward or "forward" in vars(head)


def _rows(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``values`` (``[..., C]``) at flat positions, ``[n, C]``; they need not be contiguous."""
    index: list[torch.Tensor] = []
    for size in reversed(values.shape[1:-1]):
        index.append(at % size)
        at = torch.div(at, size, rounding_mode="floor")
    rows: torch.Tensor = values[(at, *reversed(index))] if values.dim() > 1 else values.unsqueeze(0)
    return rows


def _entropies(logits: torch.Tensor, groups: tuple[Any, ...]) -> torch.Tensor:
    """``log Σ e^(z − m) − Σ e^(z − m) (z − m) / Σ e^(z − m)`` of each row, with ``m`` its largest logit.

    Both terms are at least zero, so nothing cancels. A logit of −∞ counts as probability zero; NaN and +∞
    come out as NaN.

    Args:
        logits: ``[n, V]``, or this process's part of the vocabulary, which may be empty.
        groups: process groups over which the vocabulary is split.
    """
    z = _wide(logits)
    largest = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf)
    for group in groups:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    below = (z - largest.unsqueeze(-1)).clamp_(min=-_NOTHING)
    weights = below.exp()
    sums = torch.stack([weights.sum(-1), torch.linalg.vecdot(weights, below)])
    for group in groups:
        torch.distributed.all_reduce(sums, group=group)
    total, weighted = sums
    entropies: torch.Tensor = total.log() - weighted / total
    return entropies


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


# -- vocabularies split over processes ---------------------------------------------------------------------


def _vocabulary_shard(logits: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """This process's part of a ``DTensor`` of logits, and the groups that hold the rest of each row."""
    groups = []
    for i, placement in enumerate(logits.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim % logits.dim() != logits.dim() - 1:
            raise NotAvailable(
                f"the logits are a DTensor placed {tuple(logits.placements)}: only whole logits and those "
                "split along the vocabulary can be sampled"
            )
        groups.append(logits.device_mesh.get_group(i))
    return local_part(logits), tuple(groups)


def _head_groups(weight: Any, hidden: Any) -> tuple[Any, ...]:
    """Groups over which an LM head is split, if every one of them works on the same hidden states."""
    if not is_sharded(hidden) or hidden.device_mesh != weight.device_mesh:
        raise NotAvailable(
            "the LM head is split over processes, and nothing says that they hold the same hidden states: "
            "pass these as a replicated DTensor on the head's mesh, or observe the logits"
        )
    groups = []
    for i, placement in enumerate(weight.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim != 0:
            raise NotAvailable(
                f"the LM head is a DTensor placed {tuple(weight.placements)}: only a split along the "
                "vocabulary can be sampled"
            )
        groups.append(weight.device_mesh.get_group(i))
    return tuple(groups)


def _local_bias(bias: Any, weight: Any) -> torch.Tensor:
    if not is_sharded(bias) or tuple(bias.placements) != tuple(weight.placements):
        raise NotAvailable("the LM head's bias is not split as its weight is")
    return local_part(bias)


def plain_tensor(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor, whole and off the graph.

    Raises:
        NotAvailable: it is split over processes.
    """
    if is_sharded(tensor):
        placements = tuple(tensor.placements)  # type: ignore[attr-defined]
        if not all(placement.is_replicate() for placement in placements):
            raise NotAvailable(f"the {what} are a DTensor placed {placements}, not replicated")
    return local_part(tensor.detach())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a ``DTensor``; any other tensor as it is."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local
