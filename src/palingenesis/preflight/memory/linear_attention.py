"""Layers of linear attention (the gated delta rule) in a step on fake tensors.

Transformers computes them with the kernels of two packages where these are installed, and else in a loop over
chunks of 64 tokens: thousands of operations a layer for long rows. Neither is gone through here:

``KERNELS``   the tensors that ``chunk_gated_delta_rule`` of flash-linear-attention (0.6) and
              ``causal_conv1d_fn`` of causal-conv1d make, keep and drop, in their order. The states of chunks
              and the inner products are made anew in the backward pass, so little is kept.
``FALLBACK``  transformers' own loop, over a few chunks of many pieces of a row: pieces of a row laid side by
              side make tensors of the same bytes, and keep as many of them, in fewer and larger steps. Many
              times as much as the kernels is kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any
from unittest import mock

import torch
from torch import nn

#: Names of transformers' functions in the modules of its models.
_RULE, _CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
#: Tokens of a chunk, in the kernels and in the loop.
CHUNK = 64
#: Chunks of the loop that are gone through at least, so that what lives for one of them stays small.
LOOP = 8
#: Columns that one program of the kernel's backward pass takes (Ampere, Hopper); each sums decays apart.
_TILE = 128


class Linear(Enum):
    """How layers of linear attention are computed."""

    KERNELS = "kernels"
    FALLBACK = "fallback"


def linear_layers(described: Any) -> int:
    """How many layers of a model are linear attention."""
    kinds = getattr(described.get_text_config(), "layer_types", None) or ()
    return sum(kind == "linear_attention" for kind in kinds)


@contextmanager
def standing_in(model: nn.Module, linear: Linear) -> Iterator[None]:
    """The time in which a model on fake tensors goes through its linear attention the short way."""
    names = {type(module).__module__ for module in model.modules()}
    theirs = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _RULE)]
    with ExitStack() as stack:
        for module in theirs:
            if linear is Linear.FALLBACK:
                rule = _in_pieces(getattr(module, _RULE))
                stack.enter_context(mock.patch.object(module, _RULE, rule))
                continue
            stack.enter_context(mock.patch.object(module, _RULE, _delta_rule))
            if hasattr(module, _CONVOLUTION):
                stack.enter_context(mock.patch.object(module, _CONVOLUTION, _convolution))
        yield


# -- the loop ----------------------------------------------------------------------------------------------


def _in_pieces(loop: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loop)
    def over_pieces(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **more: Any,
    ) -> Any:
        rows, length = query.shape[:2]
        pieces = _pieces(length)
        if pieces == 1 or more.get("initial_state") is not None or more.get("output_final_state"):
            return loop(query, key, value, g=g, beta=beta, **more)
        query, key, value, g, beta = (
            one.reshape(rows * pieces, length // pieces, *one.shape[2:])
            for one in (query, key, value, g, beta)
        )
        found, state = loop(query, key, value, g=g, beta=beta, **more)
        return found.reshape(rows, length, *found.shape[2:]), state

    return over_pieces


def _pieces(length: int) -> int:
    """Into how many pieces a row is cut: of ``LOOP`` chunks or more, with no more padding than the row's."""
    chunks = -(-length // CHUNK)
    for pieces in range(chunks // LOOP, 1, -1):
        if length % pieces == 0 and -(-length // pieces // CHUNK) * pieces == chunks:
            return pieces
    return 1


# -- the kernels -------------------------------------------------------------------------------------------


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """In place of flash-linear-attention's ``chunk_gated_delta_rule``; no state is wanted in training."""
    chunks = -(-query.shape[1] // CHUNK)
    if cu_seqlens is not None:
        chunks += cu_seqlens.numel() - 2  # each document ends in a chunk of its own
    kernel: Any = _DeltaRule.apply
    made: torch.Tensor = kernel(query, key, value, g, beta, chunks, use_qk_l2norm_in_kernel)
    return made, None


class _DeltaRule(torch.autograd.Function):
    """What the kernels of the gated delta rule allocate."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        chunks: int,
        normed: bool,
    ) -> torch.Tensor:
        with torch.enable_grad():  # a block that is computed once more is told by it
            given = [_contiguous(one) for one in (query, key, value, decay, beta)]
            query, key, value, decay, beta = given
            norms: list[torch.Tensor] = []
            if normed:
                query, key = torch.empty_like(query), torch.empty_like(key)
                norms = [torch.empty(one.shape[:-1], dtype=torch.float32) for one in (query, key)]
            summed = torch.empty_like(decay, dtype=torch.float32)
            solved = key.new_empty(*value.shape[:3], CHUNK)
            inner = _inner(key, value, chunks)
            result = torch.empty_like(value)
        del inner, given
        ctx.save_for_backward(query, key, value, summed, beta, solved, *norms)
        ctx.chunks, ctx.decay, ctx.normed = chunks, decay.dtype, normed
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, summed, beta, _, *_ = ctx.saved_tensors
        given = _contiguous(gradients[0])
        inner = _inner(key, value, ctx.chunks)
        of_values = torch.empty_like(given)
        of_states = torch.empty_like(inner[2])
        of_values = torch.empty_like(of_values)
        of_query, of_key = inner[0].new_empty(inner[0].shape), inner[0].new_empty(inner[0].shape)
        of_decay = torch.empty(-(-key.shape[-1] // _TILE), *summed.shape, dtype=torch.float32)
        of_w = torch.empty_like(inner[0])
        of_query, of_key = _over_groups(of_query, query), _over_groups(of_key, key)
        of_decay = of_decay.sum(0)
        further = _over_groups(inner[0].new_empty(inner[0].shape), key)
        of_value, of_beta = torch.empty_like(value), torch.empty_like(beta)
        of_decay = torch.empty_like(of_decay)
        del inner, of_values, of_states, of_w, further, given
        if ctx.normed:
            of_query, of_key = torch.empty_like(query), torch.empty_like(key)
        return of_query, of_key, of_value, of_decay.to(ctx.decay), of_beta, None, None


def _inner(key: torch.Tensor, value: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """What is made in both directions: both sides of the update, the state of each chunk, new values."""
    heads, width = value.shape[2:]
    rows, size = key.shape[0], key.shape[-1]
    return [
        key.new_empty(*value.shape[:3], size),
        torch.empty_like(value),
        key.new_empty(rows, chunks, heads, size, width),
        torch.empty_like(value),
    ]


def _over_groups(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The sum over the value heads that share a head of queries and keys."""
    rows, length, heads, size = of.shape
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(rows, length, heads, -1, size).sum(3)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _convolution(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """In place of causal-conv1d's ``causal_conv1d_fn``."""
    kernel: Any = _Convolution.apply
    made: torch.Tensor = kernel(hidden_states, weight, bias)
    return made


class _Convolution(torch.autograd.Function):
    """What causal-conv1d allocates: the activation is computed once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        with torch.enable_grad():
            hidden = _one_way(hidden)
            result = torch.empty_like(hidden)
        ctx.save_for_backward(hidden, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        given = _one_way(gradients[0])
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.empty_like(weight, dtype=torch.float32).to(weight.dtype)
        del given
        return of_hidden, of_weight, None if bias is None else torch.empty_like(bias)


def _one_way(tensor: torch.Tensor) -> torch.Tensor:
    """As it is if channels or tokens lie side by side; else a copy."""
    return tensor if 1 in (tensor.stride(1), tensor.stride(2)) else torch.empty_like(tensor)
