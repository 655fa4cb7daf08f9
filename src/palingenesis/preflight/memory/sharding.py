"""What several ranks change: FSDP2 is traced as one rank of many goes through it, DDP's buckets are added.

FSDP2 is not described here but done: transformers splits the model (``fully_shard`` on every block, on the
embedding, and on final norm and head together), and PyTorch's own code gathers weights and reduces gradients.
Where tensors are fake, so is the group of ranks: PyTorch has one that moves nothing.

DDP keeps everything on every rank, and beside it a flat copy of all gradients in its buckets (accelerate
leaves ``gradient_as_bucket_view`` off), each of which is closed by the parameter that reaches its limit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory.storages import local

_MIB = 2**20
#: PyTorch's ``bucket_cap_mb``, which nothing here changes.
BUCKET = 25 * _MIB


@dataclass(frozen=True)
class Sizes:
    """A model's parameters, in bytes, tied ones once.

    Attributes:
        all: whole.
        trained: of those that are trained, whole.
        held: what a rank holds of them.
    """

    all: int
    trained: int
    held: int


def sizes_of(model: nn.Module) -> Sizes:
    """The sizes of a model's parameters."""
    every = list(model.parameters())
    return Sizes(
        all=_bytes(every),
        trained=_bytes(one for one in every if one.requires_grad),
        held=_bytes(local(one) for one in every),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def buckets(model: nn.Module) -> Iterator[int]:
    """The bytes of each of DDP's buckets, as gradients come: from the last parameter to the first."""
    filled: dict[torch.dtype, int] = {}
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in reversed(trained):
        filled[one.dtype] = filled.get(one.dtype, 0) + one.numel() * one.element_size()
        if filled[one.dtype] >= BUCKET:
            yield filled.pop(one.dtype)
    yield from filled.values()


@contextmanager
def group_of(ranks: int, *, join: bool = False) -> Iterator[None]:
    """The time in which this process is the first of so many ranks, of which the others are made up.

    Args:
        ranks: how many.
        join: where this process is one of several real ones, it stays that.

    Raises:
        ConfigError: the process is one of several real ones.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if join:
            yield
            return
        raise ConfigError(
            "parallel.strategy is fsdp2, whose memory is traced with ranks that are made up, and this "
            "process is one of several real ones: run `pgs profile` by itself, without torchrun"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with warnings.catch_warnings():
            # What modules return is at times a view, which matters to nobody who does not write into it.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
            yield
    finally:
        dist.destroy_process_group()


class Splitter:
    """Splits models over all ranks of the group that this process is in.

    Made before tensors are fake: the list of ranks has values.

    Raises:
        ConfigError: the installed transformers does not split models.
    """

    def __init__(self, ranks: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        names = ("pp", "dp_replicate", "fsdp", "tp")
        try:
            from transformers.distributed.configuration_utils import DistributedConfig
            from transformers.distributed.utils import TransformersDeviceMesh

            # On the CPU, whatever devices there are: that is where fake tensors are.
            shape = (1, 1, ranks, 1)
            dense = init_device_mesh("cpu", shape, mesh_dim_names=names)
            experts = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
            self._config: Any = DistributedConfig(fsdp_size=ranks)
            self._mesh: Any = TransformersDeviceMesh(dense, experts)
        except (ImportError, TypeError) as error:
            raise _too_old(error) from None

    def split(self, model: Any) -> None:
        """Leave every rank its share of a model's parameters."""
        head = model.get_output_embeddings()
        tied = head.weight is model.get_input_embeddings().weight
        if tied:  # where a model is loaded, it is split first
            head.weight = nn.Parameter(torch.empty_like(head.weight))
        try:
            type(model).maybe_distribute_model(model, self._config, self._mesh)
        except AttributeError as error:
            raise _too_old(error) from None
        except ValueError as error:
            raise ConfigError(f"parallel.strategy is fsdp2, and the model cannot be split: {error}") from None
        if tied:
            model.tie_weights()


def _too_old(error: Exception) -> ConfigError:
    import transformers

    return ConfigError(
        f"parallel.strategy is fsdp2, which transformers {transformers.__version__} cannot do ({error}): "
        "install a newer one with pip install -U transformers, or set parallel.strategy to ddp"
    )
