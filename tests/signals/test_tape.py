"""Scalars of single steps, on the host and in the buffer of an accelerator."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from palingenesis.signals.tape import StepTape


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        True + 1.5,
        torch.tensor(2.5),
        torch.tensor([[2.5]]),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64, requires_grad=True) * 1,
    ],
    ids=repr,
)
def test_numbers_and_tensors_of_one_element(value: torch.Tensor | float) -> None:
    tape = StepTape(5)
    tape.note(3, value)
    assert tape.buffer is None
    assert tape.take().values(None) == [(3, 2.5)]
    assert tape.take().values(None) == []


def test_order_and_what_is_not_finite() -> None:
    tape = StepTape(5)
    tape.note(2, math.inf)
    tape.note(1, -1.0)
    tape.note(3, torch.tensor(math.nan))
    (first, second, third) = tape.take().values(None)
    assert (first, second) == ((1, -1.0), (2, math.inf))
    assert third[0] == 3
    assert math.isnan(third[1])


def test_no_tensor_and_no_graph_is_kept() -> None:
    tape = StepTape(5)
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    alive = weakref.ref(loss)
    tape.note(1, loss)
    del loss
    gc.collect()
    assert alive() is None


class _Elsewhere:
    """A buffer on a device that this machine need not have: the tape sees one, the test reads it."""

    device = torch.device("cuda", 0)

    def __init__(self, capacity: int) -> None:
        self.values = torch.zeros(capacity, dtype=torch.float64)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self.values[slot]


class _OnDevice(torch.Tensor):
    """A tensor that says it lies on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _Elsewhere.device

    def detach(self) -> torch.Tensor:
        return self


def test_values_of_a_device_wait_in_its_buffer() -> None:
    tape = StepTape(4)
    buffer = _Elsewhere(4)
    tape._buffer = buffer  # type: ignore[assignment]
    for check in range(3):
        assert tape.buffer is None
        for i in range(4):
            tape.note(4 * check + i + 1, torch.tensor(float(10 * check + i)).as_subclass(_OnDevice))
        tape.note(4 * check + 2, 0.5)  # a number given for one of the steps
        arrived = tape.buffer.values.clone().numpy()  # type: ignore[union-attr]
        cut = tape.take()
        expected = {4 * check + i + 1: float(10 * check + i) for i in range(4)}
        assert dict(cut.values(arrived)) == expected


def test_the_newest_stay_where_checks_do_not_come() -> None:
    """A monitor that fails at every check must not grow, nor mix up what it remembers."""
    host, device = StepTape(3), StepTape(3)
    device._buffer = buffer = _Elsewhere(3)  # type: ignore[assignment]
    for step in [*range(1, 8), 6, 7, 8]:  # as after going back to a checkpoint
        host.note(step, float(step))
        device.note(step, torch.tensor(float(step)).as_subclass(_OnDevice))
    assert host.take().values(None)[-2:] == [(7, 7.0), (8, 8.0)]
    assert device.take().values(buffer.values.numpy()) == [(6, 6.0), (7, 7.0), (8, 8.0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    tape = StepTape(3)
    for check in range(2):
        for i in range(3):
            tape.note(3 * check + i, torch.tensor(float(i + check), device="cuda", requires_grad=True) * 1)
        assert tape.buffer is not None
        arrived = tape.buffer.cpu().numpy()
        assert tape.take().values(arrived) == [(3 * check + i, float(i + check)) for i in range(3)]
