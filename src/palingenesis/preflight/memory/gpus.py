"""How much memory a card has, as PyTorch reports it."""

from __future__ import annotations

import difflib

from palingenesis.errors import ConfigError

_GIB = 2**30

#: Bytes that are there to be allocated, by name: what PyTorch gives as a card's total capacity (in its
#: out-of-memory message, and as ``torch.cuda.get_device_properties().total_memory``), which is less than the
#: card is sold with. Where cards of one name differ, the least.
GPUS: dict[str, float] = {
    "t4-16gb": 14.56 * _GIB,
    "v100-16gb": 15.77 * _GIB,
    "v100-32gb": 31.73 * _GIB,
    "rtx3090-24gb": 23.56 * _GIB,
    "rtx4090-24gb": 23.51 * _GIB,
    "rtx5090-32gb": 31.33 * _GIB,
    "a10-24gb": 21.98 * _GIB,
    "l4-24gb": 21.95 * _GIB,
    "a6000-48gb": 47.40 * _GIB,
    "l40s-48gb": 44.31 * _GIB,
    "a100-40gb": 39.38 * _GIB,
    "a100-80gb": 79.14 * _GIB,
    "h100-80gb": 79.09 * _GIB,
    "h200-141gb": 139.71 * _GIB,
    "b200-180gb": 178.35 * _GIB,
}


def gpu_memory(name: str) -> int:
    """The bytes of a card.

    Raises:
        ConfigError: no card of that name is known.
    """
    # The command line turns hyphens into underscores.
    asked = name.lower().replace("_", "-").replace(" ", "-")
    if asked in GPUS:
        return int(GPUS[asked])
    near = difflib.get_close_matches(asked, GPUS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"--gpu: no card {name!r} is known; {hint}known are {', '.join(GPUS)}; for another give "
        "--gpu_memory_gb"
    )
