"""An LM head and what is read from its logits, a chunk of positions at a time in both directions.

With ``z`` the logits of a position after scale and soft cap, ``p = softmax(z)`` and ``t`` its target::

    log_p = log p_t            ∂/∂z_v = [v = t] − p_v
    entropy = −Σ p log p       ∂/∂z_v = −p_v (log p_v + entropy)
    collision = Σ p²           never differentiated: gates only

All of it is in fp32 (fp64 of fp64 logits), whatever the logits are in. The backward pass forms a chunk's
logits again.

A head that is only a weight is worked on directly, and its gradient is added up over the chunks in fp32. Any
other module (LoRA, quantised, wrapped by FSDP2, with hooks) is *called* with each chunk under activation
checkpointing, so that whatever it does is done, and undone, as for a whole batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from palingenesis.errors import ConfigError
from palingenesis.layers import is_sharded

# A log-probability below this is a probability of zero, also in fp64, and so is what it adds.
_NOTHING = -1000.0

Bounds = list[tuple[int, int]]
"""First position, and the one after the last, of every chunk."""


class After(NamedTuple):
    """What the model does to the head's output: ``z · scale``, then ``soft_cap · tanh(z / soft_cap)``."""

    scale: float
    soft_cap: float | None


class Found(NamedTuple):
    """Statistics of some positions, ``[n]`` each."""

    log_p: torch.Tensor
    entropy: torch.Tensor
    collision: torch.Tensor
    is_top1: torch.Tensor


# -- one chunk ---------------------------------------------------------------------------------------------


def _finish(logits: torch.Tensor, after: After) -> torch.Tensor:
    z = logits if logits.dtype == torch.float64 else logits.float()
    if after.scale != 1.0:
        z = z * after.scale
    if after.soft_cap is not None:
        z = torch.tanh(z / after.soft_cap) * after.soft_cap
    return z


def _read(logits: torch.Tensor, targets: torch.Tensor, after: After) -> Found:
    """Statistics from the head's output ``[n, V]``. No autograd."""
    z = _finish(logits, after)
    is_top1 = z.argmax(-1) == targets
    log_probs = z.log_softmax(-1)
    del z
    log_p = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    log_probs.clamp_(min=_NOTHING)  # 0 · −∞ would be NaN; NaN stays NaN
    probs = log_probs.exp()
    # A norm and not a product of matrices: those may be rounded to TF32.
    collision = torch.linalg.vector_norm(probs, dim=-1).square()
    return Found(log_p, -log_probs.mul_(probs).sum(-1), collision, is_top1)


def _logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    after: After,
    entropy: torch.Tensor,
    d_log_p: torch.Tensor | None,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the head's output ``[n, V]``, in its dtype, from those of the statistics."""
    if d_log_p is None:
        d_log_p = torch.zeros_like(entropy)
    z = _finish(logits, after)
    log_probs = z.log_softmax(-1).clamp_(min=_NOTHING)
    # In place from here on: this is where the most memory is in use. Under a cap, z is a tensor of our own.
    slope = None if after.soft_cap is None else z.div_(after.soft_cap).square_().neg_().add_(1.0)
    del z
    probs = log_probs.exp()
    if d_entropy is None:
        gradient = probs.mul_(-d_log_p.unsqueeze(-1))
    else:
        by_entropy = log_probs.add_(entropy.unsqueeze(-1)).mul_(probs).mul_(d_entropy.unsqueeze(-1))
        gradient = probs.mul_(-d_log_p.unsqueeze(-1)).sub_(by_entropy)
    gradient.scatter_add_(-1, targets.unsqueeze(-1), d_log_p.unsqueeze(-1))
    if slope is not None:
        gradient.mul_(slope)
    if after.scale != 1.0:
        gradient.mul_(after.scale)
    return gradient.to(logits.dtype)


# -- a head that is only a weight --------------------------------------------------------------------------


def through_weight(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    bounds: Bounds,
    after: After,
) -> Found:
    """From a weight ``[V, D]``, for rows ``[n, D]`` and their targets ``[n]``."""
    if is_sharded(weight):
        raise ConfigError(
            "the LM head's weight is split over processes (DTensor) and would get this rank's gradient only: "
            "call this inside the forward of the module that fully_shard was applied to, where the weight is "
            "whole, or apply fully_shard to the head and pass the module"
        )
    if weight.is_meta or weight.dim() != 2 or weight.shape[1] != rows.shape[-1]:
        raise ConfigError(
            f"the LM head's weight is {list(weight.shape)} on {weight.device} where hidden states of size "
            f"{rows.shape[-1]} need [vocabulary, {rows.shape[-1]}]; a weight that DeepSpeed or FSDP1 has put "
            "away is not gathered here: use FSDP2"
        )
    rows, targets = rows.to(weight.device), targets.to(weight.device)
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        rows, weight = rows.to(low), weight.to(low)
        bias = None if bias is None else bias.to(low)
    if rows.dtype != weight.dtype:
        raise ConfigError(
            f"the hidden states are {rows.dtype} and the LM head's weight {weight.dtype}: cast one of "
            "them, or use autocast"
        )
    _check_targets(targets, weight.shape[0])
    found: tuple[torch.Tensor, ...] = _WeightHead.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, targets, bounds, after
    )
    return Found(*found)


class _WeightHead(torch.autograd.Function):
    """Statistics from hidden states ``[n, D]`` and a weight; chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        bounds: Bounds,
        after: After,
    ) -> tuple[torch.Tensor, ...]:
        chunks = [
            _read(functional.linear(rows[start:end], weight, bias), targets[start:end], after)
            for start, end in bounds
        ]
        found = Found(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        ctx.save_for_backward(rows, weight, bias, targets, found.entropy)
        ctx.bounds, ctx.after = bounds, after
        ctx.mark_non_differentiable(found.collision, found.is_top1)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_log_p: torch.Tensor | None, d_entropy: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        rows, weight, bias, targets, entropy = ctx.saved_tensors
        sums = torch.float64 if rows.dtype == torch.float64 else torch.float32
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=sums) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=sums) if ctx.needs_input_grad[2] else None
        # A backward() under autocast must not recompute other logits than the forward pass read.
        with torch.autocast(rows.device.type, enabled=False):
            for start, end in ctx.bounds:
                part = slice(start, end)
                d_logits = _logit_gradient(
                    functional.linear(rows[part], weight, bias),
                    targets[part],
                    ctx.after,
                    entropy[part],
                    None if d_log_p is None else d_log_p[part],
                    None if d_entropy is None else d_entropy[part],
                )
                if d_rows is not None:
                    torch.mm(d_logits, weight, out=d_rows[part])
                if d_weight is not None:
                    _add_product(d_weight, d_logits.T, rows[part])
                if d_bias is not None:
                    d_bias += d_logits.sum(0, dtype=sums)
                del d_logits  # not beside the next chunk
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_rows, d_weight, d_bias, None, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, rounded once to the factors' dtype if that is the lower one."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _check_targets(targets: torch.Tensor, vocabulary: int) -> None:
    if targets.numel():
        least, most = torch.stack([targets.min(), targets.max()]).tolist()
        if least < 0 or most >= vocabulary:
            raise ConfigError(
                f"labels hold {least if least < 0 else most} where the LM head has {vocabulary} outputs: "
                f"labels are token ids from 0 to {vocabulary - 1}, or -100"
            )


# -- a head that has to be called --------------------------------------------------------------------------


def through_module(
    rows: torch.Tensor, head: nn.Module, targets: torch.Tensor, bounds: Bounds, after: After
) -> Found:
    """From a module, called once for every chunk."""
    _refuse_module(head, len(bounds))
    vocabulary = getattr(head, "out_features", None)
    if isinstance(vocabulary, int):
        _check_targets(targets, vocabulary)
    # An empty chunk is computed too: under FSDP2 each call is a collective.
    chunks = [
        checkpoint(_call, head, rows[start:end], targets[start:end], after, use_reentrant=False)
        for start, end in bounds
    ]
    return Found(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _call(
    head: nn.Module, rows: torch.Tensor, targets: torch.Tensor, after: After
) -> tuple[torch.Tensor, ...]:
    logits = head(rows)
    if is_sharded(logits):
        raise ConfigError(
            "the LM head's output is split over processes (DTensor): use FSDP2 or DDP without it"
        )
    found: tuple[torch.Tensor, ...] = _FromLogits.apply(  # type: ignore[no-untyped-call]
        logits, targets.to(logits.device), after
    )
    return found


class _FromLogits(torch.autograd.Function):
    """Statistics from one chunk of a head's output ``[n, V]``."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, after: After
    ) -> tuple[torch.Tensor, ...]:
        found = _read(logits, targets, after)
        ctx.save_for_backward(logits, targets, found.entropy)
        ctx.after = after
        ctx.mark_non_differentiable(found.collision, found.is_top1)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_log_p: torch.Tensor | None, d_entropy: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        logits, targets, entropy = ctx.saved_tensors
        return _logit_gradient(logits, targets, ctx.after, entropy, d_log_p, d_entropy), None, None


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling ``head`` does nothing but multiply by its weight, and the weight is all here."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and "forward" not in vars(head)
        and type(head.weight) in (torch.Tensor, nn.Parameter)
        and not head._forward_hooks
        and not head._forward_pre_hooks
        and not head._backward_hooks
        and not head._backward_pre_hooks
    )


def _refuse_module(head: nn.Module, chunks: int) -> None:
    """Raise for a head that, called a chunk at a time, would not do what it does for a whole batch."""
    kind = type(head).__name__
    for name, module in head.named_modules():
        # One random draw a chunk is not the draw for the whole, so the number of chunks would change numbers.
        active = isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        if active and chunks > 1:
            raise ConfigError(
                f"the LM head ({kind}) has active dropout in {name!r}, and its random numbers would depend "
                "on the number of chunks: set that dropout to 0 (lora_dropout, for an adapter), or use one "
                "chunk"
            )
    sharded = [parameter for parameter in head.parameters() if is_sharded(parameter)]
    if not sharded:
        return
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(head, FSDPModule):
        raise ConfigError(
            f"the LM head ({kind}) has parameters split over processes (DTensor) that calling it does not "
            "gather: call this inside the forward of the module that fully_shard was applied to, or apply "
            "fully_shard to the head itself; tensor parallelism is not supported"
        )
    for parameter in sharded:
        placements: Any = parameter.placements  # type: ignore[attr-defined]
        if sum(not placement.is_replicate() for placement in placements) > 1:
            raise ConfigError(
                f"the LM head ({kind}) is split by FSDP2 and by tensor parallelism ({tuple(placements)}): "
                "the chunked loss supports FSDP2 alone"
            )
