"""Memory in use, in 10⁹ bytes: the CUDA allocator's own books, and the process on the host.

``health/cuda_allocated_gb`` and ``health/cuda_reserved_gb`` are what tensors take and what the allocator
holds right now; ``health/cuda_peak_gb`` the most that tensors took since the process began, or since the
training code last called ``torch.cuda.reset_peak_memory_stats`` (the monitor never does). They are added over
the devices of this process, so with several of them the peak is an upper bound.
``health/cuda_utilization_pct`` is allocated / total memory of the fullest of them. Memory that other
processes or libraries take is in none of these. Reading them asks the allocator, not the device.

``health/host_rss_gb`` is the physical memory of this process alone, without its data-loading workers. Linux
tells it in ``/proc``; elsewhere ``psutil`` is asked, if it is installed.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from palingenesis.layers import Layers
from palingenesis.signals.values import Values

GB = 1e9
HOST = "health/host_rss_gb"
NAMES = (
    "health/cuda_peak_gb",
    "health/cuda_allocated_gb",
    "health/cuda_reserved_gb",
    "health/cuda_utilization_pct",
    HOST,
)

_STATM = Path("/proc/self/statm")


class Memory:
    """Reads the books when asked.

    ``compute`` returns one key, ``memory``: a value for each of ``NAMES``, on the host, NaN where there is
    none. Ranks are compared by *maxima* of what ``decode`` makes of it.

    Args:
        layers: the devices of their parameters count. Where none is on CUDA but the process uses it, as with
            parameters offloaded to the host, its current device counts.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def compute(self) -> dict[str, torch.Tensor]:
        """What the books say now, ``[5]``."""
        values = [*_cuda(self._devices()), _host_gb()]
        # The device is named: a default device set by the user must not catch it.
        return {"memory": torch.tensor(values, dtype=torch.float64, device="cpu")}

    def decode(self, arrays: dict[str, NDArray[np.float64]]) -> Values:
        found = dict(zip(NAMES, arrays["memory"].tolist(), strict=True))
        scalars = {name: value for name, value in found.items() if not math.isnan(value)}
        if HOST in scalars:
            return Values(scalars)
        reason = "this system tells it only through psutil: pip install psutil"
        return Values(scalars, unavailable={HOST: reason})

    def _devices(self) -> set[int]:
        if not torch.cuda.is_initialized():
            return set()
        devices = {unit.parameter.device for unit in self._layers.units}
        indices = {device.index for device in devices if device.type == "cuda"}
        return indices or {torch.cuda.current_device()}


def _cuda(devices: Iterable[int]) -> list[float]:
    allocated = {device: torch.cuda.memory_allocated(device) for device in devices}
    if not allocated:
        return [math.nan] * (len(NAMES) - 1)
    totals = [torch.cuda.get_device_properties(device).total_memory for device in allocated]
    shares = [taken / total for taken, total in zip(allocated.values(), totals, strict=True)]
    return [
        sum(torch.cuda.max_memory_allocated(device) for device in allocated) / GB,
        sum(allocated.values()) / GB,
        sum(torch.cuda.memory_reserved(device) for device in allocated) / GB,
        100.0 * max(shares),
    ]


def _host_gb() -> float:
    """Resident memory of this process; NaN where the system does not tell."""
    if _STATM.exists():
        resident = int(_STATM.read_bytes().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE") / GB
    try:
        psutil = importlib.import_module("psutil")
    except ModuleNotFoundError:
        return math.nan
    return int(psutil.Process().memory_info().rss) / GB
