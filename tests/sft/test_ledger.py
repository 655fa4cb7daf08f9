"""Sums of steps against sums in exact arithmetic, on one process and on two."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palingenesis.sft.ledger import FINGERPRINTS, Ledger, StepSums, fingerprint_text, total_over_ranks


def value(loss: float, ce: float, gate: float, tokens: int) -> Any:
    return SimpleNamespace(
        loss_sum=torch.tensor(float(loss), requires_grad=True),
        ce_sum=torch.tensor(ce, dtype=torch.float64),
        gate_sum=torch.tensor(gate, dtype=torch.float64),
        tokens=torch.tensor(tokens),
    )


def prints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def make() -> Ledger:
    return Ledger(torch.device("cpu"))


def test_micro_batches_add_up_to_steps() -> None:
    ledger = make()
    ledger.add(value(1.5, 2.5, 0.5, 10), prints(7), torch.tensor(30))
    ledger.add(value(0.25, 0.5, 0.125, 1), prints(9), 20)
    ledger.end_step(3)
    ledger.add(value(8.0, 9.0, 1.0, 4), prints(1), 5)
    ledger.end_step(4)
    assert ledger.take() == {
        3: StepSums(1.75, 3.0, 0.625, 11, 16, 11, 50),
        4: StepSums(8.0, 9.0, 1.0, 4, 1, 4, 5),
    }
    assert ledger.take() == {}


def test_the_step_under_way_is_not_taken() -> None:
    ledger = make()
    ledger.add(value(1.0, 1.0, 1.0, 1), None, 1)
    assert ledger.take() == {}
    ledger.end_step(1)
    ledger.end_step(2)  # nothing was added to it
    taken = ledger.take()
    assert taken[1].loss == 1.0 and taken[2] == StepSums(0, 0, 0, 0, 0, 0, 0)
    assert math.isnan(taken[2].mean(taken[2].loss))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_in_its_own_step(bad: float) -> None:
    ledger = make()
    ledger.add(value(bad, bad, 1.0, 2), prints(3), 4)
    ledger.add(value(1.0, 1.0, 1.0, 2), prints(4), 4)
    ledger.end_step(1)
    ledger.add(value(1.0, 1.0, 1.0, 2), None, 4)
    ledger.end_step(2)
    first, second = ledger.take().values()
    assert first.mean(first.loss) == pytest.approx(bad, nan_ok=True)
    assert (first.tokens, first.fingerprint) == (4, 7)
    assert second.mean(second.loss) == 0.5


def test_no_graph_is_kept() -> None:
    ledger = make()
    ledger.add(value(1.0, 1.0, 1.0, 1), None, 1)
    assert not ledger._open.requires_grad


@pytest.mark.parametrize("batches", [1, 31, 500])
def test_fingerprints_are_exact_however_many_are_added(batches: int) -> None:
    """Sums of 48-bit numbers leave double precision after 32 of them."""
    numbers = [random.Random(number).randrange(FINGERPRINTS) for number in range(batches)]
    numbers[-1] = FINGERPRINTS - 1
    ledger = make()
    for number in numbers:
        ledger.add(value(1.0, 1.0, 1.0, 1), prints(number), 1)
    ledger.end_step(1)
    (taken,) = ledger.take().values()
    assert taken.fingerprint == sum(numbers) % FINGERPRINTS
    assert fingerprint_text(taken.fingerprint) == f"{sum(numbers) % 2**48:012x}"


def test_one_batch_or_many_have_one_fingerprint() -> None:
    whole, cut = make(), make()
    numbers = [FINGERPRINTS - 1, FINGERPRINTS - 2, 12345]
    whole.add(value(1.0, 1.0, 1.0, 1), prints(sum(numbers) % FINGERPRINTS), 1)
    for number in numbers:
        cut.add(value(1.0, 1.0, 1.0, 1), prints(number), 1)
    for ledger in (whole, cut):
        ledger.end_step(1)
    assert whole.take()[1].fingerprint == cut.take()[1].fingerprint


@pytest.mark.parametrize(("total", "text"), [(0, None), (1, "000000000001"), (2**48 - 1, "f" * 12)])
def test_the_text_of_a_fingerprint(total: int, text: str | None) -> None:
    assert fingerprint_text(total) == text


def test_a_sum_by_token() -> None:
    assert StepSums(3.0, 5.0, 0.5, 2.0, 0, 2.0, 2.0).mean(3.0) == 1.5


def test_alone_the_total_is_what_it_was() -> None:
    assert total_over_ranks(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from tests.sft.test_ledger import prints, value
from palingenesis.sft.ledger import Ledger, total_over_ranks

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ledger = Ledger(torch.device("cpu"))
for step in (1, 2):
    ledger.add(value(step + rank, 2.0 * step, 0.5, 3 + rank), prints(2**48 - 1 - rank), 10 * (rank + 1))
    ledger.end_step(step)
taken = {step: list(sums) for step, sums in ledger.take().items()}
total = total_over_ranks(torch.tensor([1.0, float(rank)])).tolist()
print(json.dumps({"taken": taken, "nothing": ledger.take(), "total": total}))
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "meet")],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    both = (2**49 - 3) % 2**48
    for rank, found in enumerate(told):
        # Sums are of both; the last two are the rank's own.
        own = [3 + rank, 10 * (rank + 1)]
        assert found["taken"] == {"1": [3, 4, 1, 7, both, *own], "2": [5, 8, 1, 7, both, *own]}
        assert found["nothing"] == {}
        assert found["total"] == [2, 1]
