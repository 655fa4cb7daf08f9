"""Numbers on their way from devices to the host: one copy a device, waited for by nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Packet:
    """Tensors by name, packed into one vector a device and copied to the host.

    On CUDA the copies go to pinned memory behind whatever the device is doing; ``ready`` asks without
    waiting. Elsewhere they are there at once.

    Args:
        tensors: by name, on any devices; they may be overwritten as soon as this returns.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.device, []).append(name)
        self._parts: list[tuple[list[tuple[str, torch.Size]], torch.Tensor, Any]] = []
        for device, names in by_device.items():
            packed = torch.cat([tensors[name].detach().reshape(-1) for name in names])
            shapes = [(name, tensors[name].shape) for name in names]
            self._parts.append((shapes, *_to_host(packed, device)))

    @property
    def ready(self) -> bool:
        return all(arrival is None or arrival.query() for _, _, arrival in self._parts)

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The values by name, in their shapes. Waits for copies still under way."""
        found: dict[str, NDArray[np.float64]] = {}
        for shapes, host, arrival in self._parts:
            if arrival is not None:
                arrival.synchronize()
            values = host.numpy().astype(np.float64)
            at = 0
            for name, shape in shapes:
                found[name] = values[at : at + shape.numel()].reshape(shape)
                at += shape.numel()
        return found


def _to_host(packed: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
    if device.type != "cuda":
        return packed.cpu(), None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(device))
    return host, arrival
