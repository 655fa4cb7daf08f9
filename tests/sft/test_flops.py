"""Operations a token against products counted by torch, and peaks by the names that devices have."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from palingenesis.sft.flops import PEAKS, Flops, flops_of

LENGTH = 32


def model(tied: bool, key_values: int = 4) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=key_values,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("key_values", [4, 2])
def test_operations_are_those_that_torch_counts(tied: bool, key_values: int) -> None:
    """Every product of a forward and a backward pass, counted as they are done, but for what norms do."""
    made = model(tied, key_values)
    ids = torch.arange(LENGTH)[None] % 96
    with FlopCounterMode(display=False) as counter:
        made(input_ids=ids, labels=ids).loss.backward()
    found = flops_of(made, LENGTH, device_name="NVIDIA H200")
    assert found is not None
    # Norm weights (a few hundred parameters) are counted by the definition, and no products. The first
    # layer's backward pass needs no gradient of its input but has one.
    assert found.per_token * LENGTH == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
    ],
)
def test_peaks(name: str, peak: float) -> None:
    found = flops_of(model(False), LENGTH, device_name=name)
    assert found is not None and found.peak == peak
    assert peak in PEAKS.values()


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "AMD Instinct MI300X",
        "NVIDIA RTX A1000",  # no A100
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of one
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
    ],
)
def test_no_peak_is_guessed(name: str | None) -> None:
    assert flops_of(model(False), LENGTH, device_name=name) is None


def test_the_share_of_the_peak() -> None:
    assert Flops(per_token=4e9, peak=1e15).of_peak(100_000.0) == pytest.approx(0.4)
