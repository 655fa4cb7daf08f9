"""An incident's origin follows the forward pass, not the order in which modules were registered."""

from __future__ import annotations

import torch
from torch import nn

from palingenesis import Monitor
from palingenesis.order import forward_order


class Twisted(nn.Module):
    """Registered as last, first, middle; run as first, middle, last."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(4, 4) for _ in range(3))
        self.cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x).relu()).relu()
        return self.last(hidden.detach() if self.cut else hidden)


def run(*, backward_first: bool) -> Monitor:
    torch.manual_seed(0)
    model = Twisted()
    monitor = Monitor(model, None, out=None, check_every=1, warmup=3)
    for step in range(12):
        model.cut = step >= 8
        model.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        if not backward_first:
            monitor.learn_order(loss)
        loss.backward()
        monitor.step(loss if backward_first else loss.detach())
    return monitor


def test_the_origin_is_the_layer_before_the_cut() -> None:
    for backward_first in (True, False):
        incident = next(e for e in run(backward_first=backward_first).events if e.event == "incident")
        assert (incident.origin, incident.layers) == ("middle", ["middle", "first"])


def test_forward_order_sees_the_first_use_of_each_parameter() -> None:
    model = Twisted()
    x = model.first(torch.randn(2, 4))
    loss = (model.last(model.middle(x)) + model.first(x)).sum()
    found = forward_order(loss)
    places = [found[id(layer.weight)] for layer in (model.first, model.middle, model.last)]
    assert places == sorted(places)
    assert len(found) == 6


def test_a_loss_off_the_graph_teaches_nothing_and_harms_nothing() -> None:
    monitor = Monitor(Twisted(), None, out=None)
    monitor.learn_order(torch.tensor(1.0))
    monitor.step(torch.tensor(1.0))
    assert not [event for event in monitor.events if event.event == "monitor_error"]
