"""The example in docs/signals.md runs as written, and its numbers are those of an exact computation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis import load_run

DOCS = Path(__file__).parents[2] / "docs" / "signals.md"


def test_the_example_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    gradients: list[torch.Tensor] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
            super().step()

    given: dict[str, Any] = {
        "model": model,
        "optimizer": Spy(model.parameters(), lr=1e-2),
        "loader": [torch.randn(16, 64) for _ in range(10)],
        "readings": [],
    }
    exec(compile(example.group(1), str(DOCS), "exec"), given)
    exact = torch.cosine_similarity(gradients[-2], gradients[-1], dim=0)
    assert given["reading"].step == 10
    assert given["reading"].scalars["health/grad_cosine_sim"] == pytest.approx(float(exact), abs=0.02)
    assert [reading.step for reading in given["readings"]] == list(range(1, 11))
    ranks = load_run(tmp_path / "pgs_run").metrics["health/stable_rank_min"]
    weight = model[2].weight.detach().double()
    sigma = torch.linalg.matrix_norm(weight, 2)
    assert ranks[9] == pytest.approx(float(weight.norm().square() / sigma**2), rel=0.02)
