"""The memory of one optimizer step, before there is a GPU: what ``pgs profile`` shows.

model       the real model class, from its configuration alone
optimizers  the optimizer that the trainer would make
step        one optimizer step on fake tensors (or on real ones, to check)
storages    every allocation and release in it, and what it is for
values      what a step needs to know of fake tensors
linear_attention  layers of linear attention: what their kernels, or transformers' loop, hold
trace       the peak, what it is made of, memory over the step
sharding    FSDP2's shares, and DDP's buckets
allocator   what CUDA's caching allocator reserves for it
margin      what a card needs beside it
gpus        how much memory cards have
estimate    all of it for one configuration, held against a card
changes     what would make it fit
limits      the largest batch and the longest rows that fit
findings    what to say about it
picture     memory over the step, in characters
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palingenesis.preflight.memory.estimate import Estimate, Fit, estimate_memory

__all__ = ["Estimate", "Fit", "estimate_memory"]


def __getattr__(name: str) -> Any:
    # Late: they need torch.
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("palingenesis.preflight.memory.estimate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
