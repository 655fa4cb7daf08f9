"""A model whose forward pass reads its own LM head, a chunk of positions at a time, and hands out no logits.

It has to happen inside the forward pass: under FSDP2 the head's weight is whole only there.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from palingenesis.errors import ConfigError
from palingenesis.lm_head import after_head
from palingenesis.sft.chunked_head import is_plain_linear
from palingenesis.sft.forward_only import forward_only
from palingenesis.sft.token_statistics import IGNORED, TokenStatistics, token_statistics

#: How far a log-probability may be from the one that the model's own logits give. Half precision rounds
#: logits of size 30 by a tenth.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_IN_HALF_PRECISION = 0.25
_TRIED, _ROWS = 24, 2


@dataclass
class TokenOutput(ModelOutput):
    """Per-token numbers ``[B, T]``; entry ``t`` is about the token that position ``t`` predicts.

    ``log_probs``, ``entropy``, ``is_top1`` and ``label_mask`` are named as TRL's fused output names them.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    collision: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None

    @property
    def statistics(self) -> TokenStatistics:
        """The same as objectives take it. Where only log-probabilities were read, the rest is zero."""
        assert self.log_probs is not None and self.label_mask is not None
        none = torch.zeros_like(self.log_probs)
        entropy, collision = (none if one is None else one for one in (self.entropy, self.collision))
        is_top1 = none.bool() if self.is_top1 is None else self.is_top1
        return TokenStatistics(self.log_probs, entropy, collision, is_top1, self.label_mask)


def read_head_inside(model: PreTrainedModel, *, chunks: int, cut: bool = False) -> None:
    """Let ``model(..., labels=labels, token_statistics=True)`` return a :class:`TokenOutput`.

    Called without it, the forward pass is what it was.

    Args:
        model: a causal language model, below any adapter.
        chunks: into how many pieces the loss-bearing positions are split.
        cut: on CUDA, read plain heads with the cut-cross-entropy kernels, which give no more than the
            log-probability of each target.
    """
    before: Any = model.forward
    # As a function: a copy of the model brings its own weights.
    unbound = before.__func__ if getattr(before, "__self__", None) is model else None
    after = after_head(model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, token_statistics: bool = False, **kwargs: Any) -> Any:
        if not token_statistics:
            return before(*args, **kwargs) if unbound is None else unbound(self, *args, **kwargs)
        labels = kwargs.pop("labels")
        # With a cache transformers would not look for packed documents.
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        # Looked up at each call: adapters and shards replace it.
        head = self.get_output_embeddings()
        if cut and hidden.is_cuda and is_plain_linear(head) and after["scale"] == 1.0:
            return _cut(hidden, head, labels, after["soft_cap"])
        return _chunked(hidden, head, labels, chunks, after)

    model.forward = types.MethodType(forward, model)


def _chunked(
    hidden: torch.Tensor, head: Any, labels: torch.Tensor, chunks: int, after: dict[str, Any]
) -> TokenOutput:
    found = token_statistics(hidden, head, labels, chunks=chunks, **after)
    return TokenOutput(
        log_probs=found.log_p,
        entropy=found.entropy.detach(),
        collision=found.collision,
        is_top1=found.is_top1,
        label_mask=found.mask,
    )


def can_cut() -> bool:
    """Whether the cut-cross-entropy kernels are there: a CUDA device, and the package that holds them."""
    return torch.cuda.is_available() and find_spec("cut_cross_entropy") is not None


def _cut(hidden: torch.Tensor, head: Any, labels: torch.Tensor, soft_cap: float | None) -> TokenOutput:
    """Log-probabilities by kernels that never form logits: the variant that leaves out no gradient."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    targets = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
    loss = linear_cross_entropy(
        hidden, head.weight, targets, bias=head.bias, softcap=soft_cap, reduction="none", impl="cce_exact"
    )
    return TokenOutput(log_probs=-loss, label_mask=targets != IGNORED)


def require_exact(called: torch.nn.Module, vocabulary: int) -> None:
    """See that the numbers are those of the model's own logits, on a batch of made-up tokens.

    A model may do to its logits what its configuration does not say.

    Args:
        called: the model as training calls it, adapters and all.
        vocabulary: how many tokens there are.

    Raises:
        ConfigError: they are not.
    """
    device = next(called.parameters()).device
    ids = (torch.arange(_ROWS * _TRIED, device=device).view(_ROWS, _TRIED) * 7 + 3) % vocabulary
    with forward_only(called):
        logits = called(input_ids=ids, use_cache=False).logits
        read = called(input_ids=ids, labels=ids, token_statistics=True)
    wide = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    off = float((read.log_probs[:, :-1].double() - wide).abs().max())
    allowed = TOLERANCE.get(logits.dtype, _TOLERANCE_IN_HALF_PRECISION)
    if not off <= allowed:  # NaN is not
        raise ConfigError(
            f"{type(called).__name__} does something to its logits that its configuration does not tell: "
            f"log-probabilities read from its LM head are off by {off:.2g}; it cannot be trained here, "
            "because the loss would not be its own"
        )
