"""Floating-point operations of a training step, as a share of what the device could do.

Six a parameter and token (forward two, backward four), and for attention twelve times layers, width and
length a token: PaLM (arXiv 2204.02311), appendix B. Activation checkpointing's second forward does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

#: Peak of dense bf16 products in FLOP/s, by words of the device's name; NVIDIA's data sheets.
PEAKS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# Slices and smaller chips that are sold under the same name.
_LESS = re.compile(r"\b(MIG|Laptop|Max-Q|D)\b")


@dataclass(frozen=True)
class Flops:
    """Operations a token, and the peak of one device."""

    per_token: float
    peak: float

    def of_peak(self, tokens_per_second: float) -> float:
        """Model FLOPs utilisation, 0 to 1, from all tokens of a rank, with loss or without."""
        return tokens_per_second * self.per_token / self.peak


def flops_of(model: Any, length: float, *, device_name: str | None) -> Flops | None:
    """For a transformers model and rows of ``length`` tokens; ``None`` where the peak is not known."""
    peak = None if device_name is None else _peak(device_name)
    if peak is None:
        return None
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings().weight
    # An embedding is looked up; where it is the head as well, it is multiplied with as the head.
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embeddings
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters -= 0 if tied else embeddings.numel()
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return Flops(6.0 * parameters + attention, peak)


def _peak(device: str) -> float | None:
    if _LESS.search(device):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


def device_name() -> str | None:
    """What the accelerator is called; ``None`` where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
