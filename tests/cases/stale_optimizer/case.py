"""An optimizer that was made before the model's layers were replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.cases.tried import tried

from palingenesis.sft.trainer import FineTuner

EXPECTED = ("first_step.optimizer_stale", "first_step.stays")


def run(folder: Path, *, healthy: bool) -> Any:
    plain = FineTuner.create_optimizer

    def early(self: Any, *arguments: Any) -> Any:
        optimizer = plain(self, *arguments)
        for layer in self.network.model.layers:
            layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.detach().clone())
        return optimizer

    if healthy:
        return tried(folder)
    with mock.patch.object(FineTuner, "create_optimizer", early):
        return tried(folder)
