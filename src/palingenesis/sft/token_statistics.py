"""What an LM head says of each target token, a chunk of positions at a time.

The head and everything behind it are applied to one chunk of the loss-bearing positions; a few numbers a
position are kept and the logits are dropped. The backward pass forms a chunk's logits again. So logits never
exist whole, and nothing else changes: the mathematics of every chunk is that of the whole.

The reading itself is in :mod:`palingenesis.sft.chunked_head`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from palingenesis.errors import ConfigError
from palingenesis.layers import is_sharded
from palingenesis.sft.chunked_head import After, is_plain_linear, through_module, through_weight

IGNORED = -100


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token numbers, each of the shape ``[..., T]`` of the hidden states; zero where no loss is borne.

    Entry ``t`` is about the token that position ``t`` predicts.
    """

    log_p: torch.Tensor
    """Log-probability of the target. Differentiable."""
    entropy: torch.Tensor
    """``−Σ p log p`` in nats. Differentiable."""
    collision: torch.Tensor
    """``Σ p²``, the probability that two draws agree. No gradient."""
    is_top1: torch.Tensor
    """Whether the target has the largest logit."""
    mask: torch.Tensor
    """Whether the position bears loss."""


def token_statistics(
    hidden: torch.Tensor,
    head: torch.Tensor | nn.Module,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int,
    soft_cap: float | None = None,
    scale: float = 1.0,
    shifted: bool = False,
    logits_to_keep: int | torch.Tensor | None = None,
) -> TokenStatistics:
    """Statistics of every loss-bearing token, without ever forming the logits of all positions.

    On CUDA the host waits for the number of loss-bearing positions.

    Args:
        hidden: ``[..., T, D]``, what goes into the LM head.
        head: its weight ``[V, D]``, or the module. A module is needed where its output is not its weight's
            alone; it must treat every position by itself. Under FSDP2 either call this inside the forward of
            the module whose ``fully_shard`` holds the head's weight (the weight is whole there), or shard
            the head on its own and pass it.
        labels: ``[..., T]``; −100 bears no loss.
        bias: ``[V]``, with a weight only.
        chunks: into how many pieces the loss-bearing positions are split. The same on every rank where the
            head is sharded: each rank then calls it as often, whatever it has to say.
        soft_cap, scale: what the model does to the head's output ``z``: ``z · scale``, then
            ``soft_cap · tanh(z / soft_cap)``.
        shifted: the label at ``t`` is the target of position ``t`` itself. By default it is that of the
            position before, as in every causal language model, and the last position has no target.
        logits_to_keep: what the model was given: ``hidden`` holds only the last so many positions (0: all),
            or those with these indices.

    Raises:
        ConfigError: the result would not be exact (see the messages), or the shapes do not fit.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ConfigError(f"chunks={chunks!r} cannot be used: give a whole number of at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(f"soft_cap={soft_cap!r} cannot be used: give a positive number, or None for no cap")
    for name, tensor in (("hidden states", hidden), ("labels", labels)):
        if is_sharded(tensor):
            raise ConfigError(
                f"the {name} are split over processes (DTensor): tensor and sequence parallelism are not "
                "supported by the chunked loss; use FSDP2 or DDP"
            )
    targets = _targets(hidden, labels, shifted, logits_to_keep).to(hidden.device)
    mask = targets != IGNORED
    index = mask.reshape(-1).nonzero().squeeze(-1)
    rows, wanted = hidden.reshape(-1, hidden.shape[-1])[index], targets.reshape(-1)[index]
    bounds = [(len(index) * i // chunks, len(index) * (i + 1) // chunks) for i in range(chunks)]
    after = After(scale, soft_cap)
    if isinstance(head, torch.Tensor) or is_plain_linear(head):
        # Only a head that is called, and may gather its shards at each call, needs as many calls everywhere.
        bounds = [(start, end) for start, end in bounds if start < end] or [(0, 0)]
    if isinstance(head, torch.Tensor):
        found = through_weight(rows, head, bias, wanted, bounds, after)
    elif bias is not None:
        raise ConfigError("bias was given with a module, which has its own: leave it out")
    elif is_plain_linear(head):
        found = through_weight(rows, head.weight, head.bias, wanted, bounds, after)
    else:
        found = through_module(rows, head, wanted, bounds, after)
    log_p, entropy, collision, is_top1 = (_spread(values, index, mask.shape) for values in found)
    return TokenStatistics(log_p, entropy, collision, is_top1, mask)


def _targets(
    hidden: torch.Tensor, labels: torch.Tensor, shifted: bool, logits_to_keep: int | torch.Tensor | None
) -> torch.Tensor:
    """The target of every position of ``hidden``; −100 where there is none."""
    targets = labels if shifted else functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
    everything = targets
    if isinstance(logits_to_keep, torch.Tensor):
        targets = everything.index_select(-1, logits_to_keep.to(labels.device))
    elif logits_to_keep:
        targets = everything[..., -logits_to_keep:]
    if targets.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"hidden states of shape {list(hidden.shape)} do not fit labels of shape {list(labels.shape)}"
            + ("" if logits_to_keep is None else " with this logits_to_keep")
            + f": {[*targets.shape, 'D']} was expected"
        )
    if targets is not everything and int((targets != IGNORED).sum()) != int((everything != IGNORED).sum()):
        raise ConfigError(
            "logits_to_keep leaves out positions that bear loss (or keeps one twice), so the loss would not "
            "be that of the labels: keep every position before a label that is not -100"
        )
    return targets


def _spread(values: torch.Tensor, index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``values`` at flat positions ``index`` of a tensor of zeros."""
    zeros = torch.zeros(shape.numel(), dtype=values.dtype, device=index.device)
    return zeros.index_copy(0, index, values.to(index.device)).view(shape)
