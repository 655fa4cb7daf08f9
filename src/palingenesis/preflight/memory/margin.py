"""What a card needs beside the tensors of a step, each part with where its figure comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

_MIB = 2**20

#: CUDA's context with the kernels of PyTorch and its libraries, of one process.
CONTEXT = 600 * 10**6
#: Workspace of cuBLAS: what PyTorch gives it on Hopper cards; on others it is 8 MiB.
CUBLAS = 32 * _MIB
#: Buffers of NCCL: 4 MiB in each direction for each of up to 32 channels.
NCCL = 2 * 32 * 4 * _MIB
#: What watching a run holds, of the model's bytes.
WATCHING = 0.02


@dataclass(frozen=True)
class Part:
    """One part of the margin.

    Attributes:
        name, bytes: what, and how much.
        source: where the figure comes from.
    """

    name: str
    bytes: int
    source: str


def fixed_parts(config: TrainConfig, described: Any, parameters: int, world_size: int) -> list[Part]:
    """Everything but the allocator's share, which depends on the step.

    Args:
        config: the run's.
        described: the model's configuration.
        parameters: bytes of weights on one rank.
        world_size: ranks.
    """
    parts = [
        Part(
            "CUDA context",
            CONTEXT,
            "PyTorch with CUDA 12 takes 0.4 to 0.6 GB before its first tensor; benchmarks/device_memory.py "
            "measures it on a card",
        ),
        Part(
            "cuBLAS",
            CUBLAS,
            "PyTorch's default workspace on Hopper; 8 MiB on other cards (CUBLAS_WORKSPACE_CONFIG)",
        ),
    ]
    workspace = _attention(config, described)
    if workspace:
        parts.append(
            Part(
                "attention kernel",
                workspace,
                "FlashAttention's backward pass: an fp32 sum for the queries' gradient, and gradients of "
                "keys and values for every query head",
            )
        )
    parts.append(
        Part(
            "monitor",
            int(WATCHING * parameters),
            "2% of the weights: what benchmarks/tiers.py measures that watching holds",
        )
    )
    if world_size > 1:
        parts.append(Part("NCCL", NCCL, "4 MiB (NCCL_BUFFSIZE) each way for each of up to 32 channels"))
    return parts


def _attention(config: TrainConfig, described: Any) -> int:
    """What kernels of fused attention allocate inside themselves in the backward pass."""
    text = described.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    length = config.data.max_seq_length
    if config.model.attn_implementation == "eager" or not heads or not hidden or length is None:
        return 0
    size = getattr(text, "head_dim", None) or hidden // heads
    elements = config.train.per_device_batch_size * length * heads * size
    grouped = (getattr(text, "num_key_value_heads", None) or heads) < heads
    element = 2 if config.model.torch_dtype == "bfloat16" else 4
    return int(elements * (4 + (2 * element if grouped else 0)))
