"""Packing tensors for the host and unpacking them there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palingenesis.signals.packet import Packet


def test_values_come_back_by_name_in_their_shapes() -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "vector": torch.randn(7, generator=random, dtype=torch.float64),
        "empty": torch.zeros(0, dtype=torch.float64),
        "matrix": torch.randn(5, 3, generator=random, dtype=torch.float64).mT,
        "single": torch.randn(2, 2, generator=random),
    }
    packet = Packet(tensors)
    assert packet.ready
    arrays = packet.arrays()
    assert list(arrays) == list(tensors)
    for name, tensor in tensors.items():
        assert arrays[name].dtype == np.float64
        assert arrays[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(arrays[name], tensor.double().numpy())


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_may_be_overwritten_at_once(count: int) -> None:
    """One tensor alone must be copied too, not only what is joined to others."""
    tensors = {str(i): torch.full((4,), float(i + 1), dtype=torch.float64) for i in range(count)}
    packet = Packet(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    for name, values in packet.arrays().items():
        assert values.tolist() == [float(name) + 1] * 4


def test_what_is_on_the_graph_is_cut_off() -> None:
    weight = torch.ones(2, requires_grad=True)
    packet = Packet({"loss": (weight * 3).sum()})
    assert packet.arrays()["loss"] == 6.0


def test_nothing_to_send() -> None:
    packet = Packet({})
    assert packet.ready
    assert packet.arrays() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_copy_from_cuda_that_nobody_waits_for() -> None:
    tensors = {"a": torch.full((3,), 2.0, device="cuda"), "b": torch.full((2, 2), 5.0)}
    torch.cuda._sleep(200_000_000)
    tensors["a"].mul_(2)
    packet = Packet(tensors)
    assert not packet.ready
    tensors["a"].zero_()
    arrays = packet.arrays()
    assert arrays["a"].tolist() == [4.0] * 3
    assert arrays["b"].tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert packet.ready
