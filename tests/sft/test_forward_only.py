"""After a forward pass of this kind a model is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from palingenesis.sft.forward_only import forward_only


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_mode_inside_and_after(training: bool, before: bool) -> None:
    model = make().train(before)
    with forward_only(model, training=training):
        assert set(modes(model)) == {training}
        assert not model(torch.ones(1, 3)).requires_grad
    assert set(modes(model)) == {before}
    assert model(torch.ones(1, 3)).requires_grad


@pytest.mark.parametrize("before", [False, True])
def test_parts_keep_modes_of_their_own(before: bool) -> None:
    """A frozen part in evaluation mode stays in it while the rest trains."""
    model = make().train(before)
    model[2].train(not before)
    found = modes(model)
    with forward_only(model):
        pass
    assert modes(model) == found


def test_a_part_that_does_something_when_its_mode_changes_does_it_back() -> None:
    class Merging(nn.Linear):
        """Adds its adapter to its weight for evaluation, and takes it out again for training."""

        def train(self, mode: bool = True) -> Merging:
            with torch.no_grad():
                self.weight.add_(float(self.training) - float(mode))
            return super().train(mode)  # type: ignore[return-value]

    model = nn.Sequential(Merging(2, 2))
    weight = model[0].weight.clone()
    with forward_only(model):
        assert not torch.allclose(model[0].weight, weight)
    assert torch.allclose(model[0].weight, weight)


def test_after_an_error_too() -> None:
    model = make()
    with pytest.raises(ZeroDivisionError), forward_only(model):
        raise ZeroDivisionError
    assert set(modes(model)) == {True} and torch.is_grad_enabled()


def test_what_is_sharded_is_sharded_again_at_the_end() -> None:
    done: list[str] = []

    class Sharded(nn.Linear):
        def reshard(self) -> None:
            done.append("reshard")

    model = nn.Sequential(Sharded(2, 2), nn.ReLU(), Sharded(2, 2))
    with forward_only(model):
        assert not done
    assert done == ["reshard", "reshard"]
