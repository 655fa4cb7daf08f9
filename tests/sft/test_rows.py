"""Rows against the definitions of their columns, with sums written down by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from palingenesis.sft.flops import Flops
from palingenesis.sft.ledger import StepSums
from palingenesis.sft.rows import RowMaker, exp

NAN, INF = math.nan, math.inf


def sums(
    loss: float = 30.0, ce: float = 40.0, gate: float = 5.0, tokens: float = 20.0, **others: Any
) -> StepSums:
    fields: dict[str, Any] = {"fingerprint": 0, "own_tokens": tokens / 2, "own_all": 3 * tokens, **others}
    return StepSums(loss, ce, gate, tokens, **fields)


def make(plain: bool = True, norm: float = 1.0, **options: Any) -> RowMaker:
    return RowMaker(plain=plain, max_grad_norm=norm, **{"steps_per_epoch": 10.0, **options})


def logs(norm: float | None = 0.5, rate: float = 1e-3) -> dict[str, float]:
    return {"learning_rate": rate} if norm is None else {"learning_rate": rate, "grad_norm": norm}


def test_a_row_of_one_step() -> None:
    (row,) = make().step(4, {4: sums(loss=40.0)}, logs(), 2.0).values()
    assert row == {
        "train/loss": 2.0,
        "train/ppl": pytest.approx(math.exp(2.0), rel=1e-12),
        "train/lr": 1e-3,
        "train/tokens_per_sec": 5.0,
        "train/tokens_per_sec_global": 10.0,
        "train/tokens_total": 10.0,
        "train/tokens_total_all": 20.0,
        "train/step_time_s": 2.0,
        "train/epoch": 0.4,
        "train/grad_norm": 0.5,
        "train/grad_norm_raw": 0.5,
    }


def test_a_gated_objective_has_its_cross_entropy_and_gate_too() -> None:
    (row,) = make(plain=False).step(1, {1: sums()}, logs(), 1.0).values()
    assert (row["train/loss"], row["train/ce_loss"], row["train/token_gate"]) == (1.5, 2.0, 0.25)
    # Perplexity is that of the cross-entropy, whatever was trained on.
    assert row["train/ppl"] == pytest.approx(math.exp(2.0), rel=1e-12)


def test_plain_cross_entropy_is_told_once() -> None:
    (row,) = make().step(1, {1: sums()}, logs(), 1.0).values()
    assert "train/ce_loss" not in row and "train/token_gate" not in row


def test_several_steps_a_row() -> None:
    """Every step has its own loss; speed is over all of them, and the last one's row has it."""
    maker = make(steps_per_epoch=2.5)
    taken = {
        3: sums(ce=10.0, loss=10.0, tokens=10.0, fingerprint=255),
        4: sums(ce=80.0, loss=80.0, tokens=20.0),
        5: sums(ce=90.0, loss=90.0, tokens=30.0),
    }
    rows = maker.step(5, taken, logs(), 4.0)
    assert sorted(rows) == [3, 4, 5]
    assert rows[3] == {"train/loss": 1.0, "train/ppl": pytest.approx(math.e), "train/batch": "0000000000ff"}
    assert rows[4] == {"train/loss": 4.0, "train/ppl": pytest.approx(math.exp(4.0))}
    last = rows[5]
    assert last["train/loss"] == 3.0
    assert last["train/tokens_per_sec"] == 30 / 4 and last["train/tokens_per_sec_global"] == 60 / 4
    assert last["train/tokens_total"] == 30 and last["train/tokens_total_all"] == 60
    assert last["train/step_time_s"] == pytest.approx(4 / 3)
    assert last["train/epoch"] == 2.0


def test_the_next_row_begins_at_nothing_but_totals_go_on() -> None:
    maker = make(tokens_before=1000.0)
    maker.step(1, {1: sums(tokens=20.0)}, logs(), 1.0)
    row = maker.step(2, {2: sums(tokens=40.0)}, logs(), 10.0)[2]
    assert row["train/tokens_per_sec_global"] == 4.0
    assert row["train/tokens_total"] == 30.0  # of this rank, since this process began
    assert row["train/tokens_total_all"] == 1060.0  # of all ranks, of all starts
    assert maker.tokens_of_all == 1060.0


def test_steps_that_were_counted_before_their_row_are_in_it() -> None:
    """An evaluation or a checkpoint between two rows reads the sums, and the row still has their tokens."""
    whole, cut = make(), make()
    whole_row = whole.step(2, {1: sums(tokens=20.0), 2: sums(tokens=30.0)}, logs(), 5.0)[2]
    early = sums(tokens=20.0)
    assert cut.losses(early)["train/loss"] == 1.5
    cut.count(early)
    assert cut.step(2, {2: sums(tokens=30.0)}, logs(), 5.0)[2] == whole_row
    # All of them: the row has no loss of its own then, and the rest of it.
    last = make()
    last.count(early)
    row = last.step(1, {}, logs(), 5.0)[1]
    assert "train/loss" not in row and row["train/tokens_per_sec_global"] == 4.0
    assert row["train/step_time_s"] == 5.0


def test_a_step_without_a_loss_bearing_token_has_no_number() -> None:
    row = make(plain=False).step(1, {1: sums(0.0, 0.0, 0.0, 0.0)}, logs(), 1.0)[1]
    for name in ("loss", "ce_loss", "token_gate", "ppl"):
        assert math.isnan(row[f"train/{name}"]), name
    assert row["train/tokens_per_sec"] == 0.0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_is_told_as_such(bad: float) -> None:
    row = make().step(1, {1: sums(loss=bad, ce=bad)}, logs(norm=bad), 1.0)[1]
    for name in ("loss", "ppl", "grad_norm_raw"):
        assert row[f"train/{name}"] == pytest.approx(bad, nan_ok=True), name


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 1.0),
        (1.0, math.e),
        (709.0, math.exp(709.0)),
        (710.0, INF),
        (1e300, INF),
        (INF, INF),
        (-INF, 0.0),
        (NAN, NAN),
    ],
)
def test_exp(value: float, expected: float) -> None:
    assert exp(value) == pytest.approx(expected, rel=1e-15, nan_ok=True)


@pytest.mark.parametrize("largest", [0.0, 0.5, 1.0, 20.0])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 0.01, 0.3, 1.0, 40.0, 1e10, NAN, INF])
def test_the_clipped_norm_is_that_of_what_torch_leaves(largest: float, scale: float) -> None:
    """Against ``clip_grad_norm_`` on real gradients, in double precision."""
    parameters = [torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(3, 2, dtype=torch.float64, generator=random)
        if math.isfinite(scale):
            parameter.grad *= scale
        else:
            parameter.grad[0, 0] = scale
    raw = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
    if largest > 0:
        torch.nn.utils.clip_grad_norm_(parameters, largest)
    left = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
    assert make(norm=largest).clipped(raw) == pytest.approx(left, rel=1e-12, abs=0.0, nan_ok=True)


def test_without_a_norm_there_is_none_in_the_row() -> None:
    row = make().step(1, {1: sums()}, logs(norm=None), 1.0)[1]
    assert not [name for name in row if "grad_norm" in name]


def test_the_share_of_the_peak_is_of_all_tokens_of_a_rank() -> None:
    maker = make(flops=Flops(per_token=100.0, peak=1e4))
    taken = {1: sums(own_all=60.0), 2: sums(own_all=40.0)}
    row = maker.step(2, taken, logs(), 2.0)[2]
    assert row["train/mfu"] == pytest.approx((60 + 40) * 100 / 2 / 1e4)
    assert "train/mfu" not in make().step(1, {1: sums()}, logs(), 1.0)[1]


def test_an_evaluation_is_compared_with_the_newest_cross_entropy() -> None:
    maker = make(plain=False)
    metrics = {"eval_loss": 3.0, "eval_ppl": math.exp(3.0), "eval_code/loss": 2.5, "eval_eval_x/loss": 4.0}
    named = {
        "eval/loss": 3.0,
        "eval/ppl": math.exp(3.0),
        "eval/code/loss": 2.5,
        "eval/eval_x/loss": 4.0,  # a source may be called anything
    }
    assert maker.evaluation(metrics) == named  # no step yet: no gap
    maker.step(1, {1: sums()}, logs(), 1.0)
    maker.losses(sums(ce=100.0))
    assert maker.evaluation(metrics) == named | {"eval/gap": 3.0 - 5.0}  # CE against CE, not the objective
