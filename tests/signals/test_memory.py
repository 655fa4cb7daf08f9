"""Memory figures against psutil, and against an allocator that says known numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis.layers import Layers, find_layers
from palingenesis.signals import memory
from palingenesis.signals.memory import HOST, Memory
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values

psutil = pytest.importorskip("psutil", reason="psutil is not installed")

CUDA = ("peak_gb", "allocated_gb", "reserved_gb", "utilization_pct")


def read(layers: Layers | None = None) -> Values:
    found = Memory(find_layers(nn.Linear(2, 2)) if layers is None else layers)
    return found.decode(Packet(found.compute()).arrays())


def resident_gb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e9


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process may use CUDA")
def test_on_cpu_only_the_host() -> None:
    values = read()
    assert set(values.scalars) == {HOST}
    assert values.unavailable == {}
    assert values.scalars[HOST] == pytest.approx(resident_gb(), abs=0.02)


def test_the_host_follows_what_is_taken_and_given_back() -> None:
    before = read().scalars[HOST]
    taken = np.ones(200_000_000, dtype=np.uint8)
    during = read().scalars[HOST]
    assert during - before == pytest.approx(0.2, abs=0.02)
    assert during == pytest.approx(resident_gb(), abs=0.02)
    del taken
    assert read().scalars[HOST] == pytest.approx(before, abs=0.02)


def test_without_proc_psutil_is_asked_and_without_both_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATM", Path("/nowhere/statm"))
    assert read().scalars[HOST] == pytest.approx(resident_gb(), abs=0.02)
    monkeypatch.setitem(sys.modules, "psutil", None)
    values = read()
    assert HOST not in values.scalars
    assert "pip install psutil" in values.unavailable[HOST]


# Bytes that an allocator says to be allocated, at most, reserved, and there at all; two devices.
BOOKS = {0: (6e9, 9e9, 10e9, 80e9), 1: (10e9, 11e9, 12e9, 40e9)}


def say_known_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(i: int) -> Any:
        return lambda device: BOOKS[device][i]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for i, name in enumerate(("memory_allocated", "max_memory_allocated", "memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, say(i))
    total = say(3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total(device))
    )


def layers_on(*devices: str) -> Any:
    units = [SimpleNamespace(parameter=SimpleNamespace(device=torch.device(device))) for device in devices]
    return SimpleNamespace(units=units)


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        (["cuda:0", "cuda:0"], (9.0, 6.0, 10.0, 7.5)),
        (["cuda:0", "cuda:1", "cpu"], (20.0, 16.0, 22.0, 25.0)),
        (["cpu"], (11.0, 10.0, 12.0, 25.0)),  # offloaded: the current device
    ],
)
def test_the_allocators_books(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], wanted: tuple[float, ...]
) -> None:
    say_known_numbers(monkeypatch)
    values = read(layers_on(*devices)).scalars
    found = tuple(values[f"health/cuda_{name}"] for name in CUDA)
    assert found == pytest.approx(wanted)
    assert values[HOST] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_allocator() -> None:
    model = nn.Linear(2, 2, device="cuda")
    before = read(find_layers(model)).scalars
    taken = torch.empty(500_000_000, dtype=torch.uint8, device="cuda")
    during = read(find_layers(model)).scalars
    grown = during["health/cuda_allocated_gb"] - before["health/cuda_allocated_gb"]
    assert grown == pytest.approx(0.5, abs=0.01)
    total = torch.cuda.get_device_properties(0).total_memory
    assert during["health/cuda_utilization_pct"] == pytest.approx(
        100 * during["health/cuda_allocated_gb"] * 1e9 / total
    )
    del taken
    after = read(find_layers(model)).scalars
    assert after["health/cuda_peak_gb"] >= during["health/cuda_allocated_gb"] - 1e-9
