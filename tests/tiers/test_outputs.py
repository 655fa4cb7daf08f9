"""Tokens, entropy and batch sizes of all ranks, against counts made one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from palingenesis import MonitorConfig
from palingenesis.signals.noise_scale import Batch
from palingenesis.signals.packet import Packet
from palingenesis.tiers.outputs import BY_TOKENS, UNTOLD, WIDTH, Outputs

EFFICIENCY, PADDING = "health/token_efficiency", "health/padding_pct"
ENTROPY = "health/output_entropy"


def made(ranks: int = 1, **options: Any) -> list[Outputs]:
    return [Outputs(MonitorConfig(**options), ranks=ranks) for _ in range(ranks)]


def labels(seed: int, rows: int = 4, length: int = 9, ignored: float = 0.3) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    found = torch.randint(50, (rows, length), generator=random)
    return found.masked_fill(torch.rand(found.shape, generator=random) < ignored, -100)


def bearing(*batches: torch.Tensor) -> int:
    return sum(one != -100 for batch in batches for row in batch[:, 1:].tolist() for one in row)


def give(outputs: Outputs, *batches: torch.Tensor, **given: Any) -> None:
    for one in batches:
        outputs.batch(one, given.get("mask"), shifted=given.get("shifted", False), weight=given.get("weight"))


def end(each: list[Outputs], step: int = 1, *, logged: bool = True, needed: bool = True) -> None:
    for one in each:
        one.end_step(step, logged=logged, needed=needed)


def sent(each: list[Outputs]) -> tuple[np.ndarray, list[Any]]:
    """``[ranks, rows, WIDTH]`` as they arrive on rank 0, and rank 0's rows."""
    taken = [one.take() for one in each]
    return np.stack([Packet(found).arrays()["outputs"] for found, _ in taken]), taken[0][1]


def read(each: list[Outputs]) -> list[tuple[Any, Batch | None]]:
    table, rows = sent(each)
    return [each[0].decode(row, table[:, place]) for place, row in enumerate(rows)]


# -- one rank ----------------------------------------------------------------------------------------------


def test_tokens_of_one_step() -> None:
    (one,) = each = made()
    first, second = labels(0), labels(1, rows=3)
    give(one, first, second)
    end(each)
    ((values, batch),) = read(each)
    count = bearing(first, second)
    assert batch == Batch(tokens=count, sequences=7)
    assert values.scalars == {EFFICIENCY: count / (7 * 9)}
    assert set(values.unavailable) == {PADDING}


def test_padding_and_shifted_labels() -> None:
    (one,) = each = made()
    target = labels(2)
    mask = torch.ones_like(target)
    mask[:, 7:] = 0
    mask[0, 3:] = 0
    give(one, target, mask=mask, shifted=True)
    end(each)
    ((values, batch),) = read(each)
    count = int((target != -100).sum())
    assert batch == Batch(tokens=count, sequences=4)
    assert values.scalars == {EFFICIENCY: count / 36, PADDING: pytest.approx(100 * 12 / 36)}


def test_between_logging_steps_tokens_gather_and_batches_do_not() -> None:
    (one,) = each = made()
    seen = []
    for step in range(1, 7):
        seen.append(labels(step, rows=step))
        give(one, seen[-1])
        end(each, step, logged=step == 6, needed=step >= 5)
    table, rows = sent(each)
    assert [row.step for row in rows] == [5, 6] and table.shape == (1, 2, WIDTH)
    (before, batch_before), (values, batch) = (
        one.decode(row, table[:, place]) for place, row in enumerate(rows)
    )
    assert before.scalars == {} and before.unavailable == {}
    assert batch_before == Batch(bearing(seen[4]), 5)
    assert batch == Batch(bearing(seen[5]), 6)
    assert values.scalars[EFFICIENCY] == bearing(*seen) / (9 * 21)


def test_a_step_without_labels_has_no_row() -> None:
    (one,) = each = made()
    give(one, labels(0))
    end(each, 1)
    end(each, 2)
    one.batch(None, None, shifted=False, weight=1.0)
    end(each, 3)
    _, rows = sent(each)
    assert [row.step for row in rows] == [1]
    assert one.take() == ({}, [])


def test_labels_that_are_all_ignored_are_a_batch_of_no_tokens() -> None:
    (one,) = each = made()
    give(one, torch.full((4, 9), -100))
    end(each)
    ((values, batch),) = read(each)
    assert batch is None
    assert values.scalars == {EFFICIENCY: 0.0}


def test_weights_of_micro_batches() -> None:
    (one,) = made()
    assert one.weights == []
    give(one, labels(0), weight=0.5)
    give(one, labels(1), weight="tokens")
    give(one, labels(2))
    assert one.weights == [0.5, BY_TOKENS, UNTOLD]
    one.end_step(1, logged=True, needed=True)
    assert one.weights == []


# -- several ranks -----------------------------------------------------------------------------------------


def test_ranks_with_their_own_data_add_up() -> None:
    each = made(3)
    data = [[labels(10 * rank + i, rows=rank + 1) for i in range(2)] for rank in range(3)]
    for one, own in zip(each, data, strict=True):
        give(one, *own)
    end(each)
    ((values, batch),) = read(each)
    count = bearing(*(one for own in data for one in own))
    assert batch == Batch(tokens=count, sequences=2 * (1 + 2 + 3))
    assert values.scalars == {EFFICIENCY: count / (9 * 12)}


def test_ranks_with_the_same_data_count_once() -> None:
    """As under tensor parallelism: two groups of two."""
    each = made(4)
    data = [[labels(0), labels(1)], [labels(2), labels(3, rows=6)]]
    for rank, one in enumerate(each):
        give(one, *data[rank // 2])
    end(each)
    ((values, batch),) = read(each)
    count = bearing(*data[0], *data[1])
    assert batch == Batch(tokens=count, sequences=4 + 4 + 4 + 6)
    assert values.scalars == {EFFICIENCY: count / (9 * 18)}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([labels(0), labels(1).flip(0)], id="rows in another order"),
        pytest.param([labels(1), labels(0)], id="micro-batches in another order"),
        pytest.param([labels(0), labels(1).roll(1, 1)], id="moved by one"),
        pytest.param([labels(0), labels(1).clamp(max=48)], id="other words"),
        pytest.param([torch.cat([labels(0), labels(1)])], id="in one piece"),
    ],
)
def test_nearly_the_same_data_is_not_the_same(other: list[torch.Tensor]) -> None:
    each = made(2)
    own = [labels(0), labels(1)]
    assert not all(map(torch.equal, own, other)) or len(other) == 1
    give(each[0], *own)
    give(each[1], *other)
    end(each)
    ((_, batch),) = read(each)
    assert batch == Batch(tokens=bearing(*own) + bearing(*other), sequences=16)


def test_one_label_of_many_tells_ranks_apart() -> None:
    each = made(2)
    own = torch.randint(150_000, (8, 2048), generator=torch.Generator().manual_seed(0))
    other = own.clone()
    other[5, 1000] += 1
    give(each[0], own)
    give(each[1], other)
    end(each)
    ((_, batch),) = read(each)
    assert batch == Batch(tokens=2 * 8 * 2047, sequences=16)
    give(each[0], own)
    give(each[1], own.to(torch.int32))  # the same in another dtype
    end(each)
    ((_, batch),) = read(each)
    assert batch == Batch(tokens=8 * 2047, sequences=8)


def test_the_same_data_at_one_step_and_not_at_the_next() -> None:
    each = made(2)
    for step, seeds in ((1, (0, 0)), (2, (1, 2))):
        for one, seed in zip(each, seeds, strict=True):
            give(one, labels(seed))
        end(each, step)
    (_, once), (values, both) = read(each)
    assert once == Batch(bearing(labels(0)), 4)
    assert both == Batch(bearing(labels(1), labels(2)), 8)
    assert values.scalars[EFFICIENCY] == bearing(labels(0), labels(1), labels(2)) / (9 * 12)


def test_a_rank_without_labels_is_not_taken_for_all() -> None:
    each = made(2)
    give(each[0], labels(0))
    end(each)
    ((values, _),) = read(each)
    assert values.scalars == {}


def test_ranks_make_a_row_of_every_step_so_that_their_rows_fit() -> None:
    each = made(2)
    for step in range(1, 5):
        give(each[step % 2], labels(step))
        end(each, step, logged=False, needed=False)
    table, rows = sent(each)
    assert [row.step for row in rows] == [1, 2, 3, 4] and table.shape == (2, 4, WIDTH)
    assert [each[0].decode(row, table[:, i])[0].scalars for i, row in enumerate(rows)] == [{}] * 4


# -- entropy -----------------------------------------------------------------------------------------------


def observe(outputs: Outputs, logits: torch.Tensor, target: torch.Tensor) -> None:
    give(outputs, target)
    outputs.entropy.observe_output(logits=logits, labels=target)


def test_entropy_of_all_ranks() -> None:
    each = made(2, rl_readiness=True, entropy_positions=1000)
    random = torch.Generator().manual_seed(0)
    total = count = 0.0
    for rank, one in enumerate(each):
        for i in range(2):
            target = labels(10 * rank + i)
            logits = 3 * torch.randn(4, 9, 50, generator=random)
            observe(one, logits, target)
            for row, targets in zip(logits.double(), target, strict=True):
                for position, word in zip(row[:-1], targets[1:], strict=True):
                    if word != -100:
                        p = position.softmax(-1)
                        total -= float((p * p.log()).sum())
                        count += 1
    end(each)
    ((values, _),) = read(each)
    assert values.scalars[ENTROPY] == pytest.approx(total / count, rel=1e-5)
    assert values.scalars[f"{ENTROPY}_se"] == 0.0


def test_entropy_of_the_same_data_counts_once() -> None:
    """Each rank draws its own positions; of ranks with the same data one is read."""
    each = made(2, rl_readiness=True, entropy_positions=4)
    logits, target = 3 * torch.randn(4, 9, 50, generator=torch.Generator().manual_seed(0)), labels(0)
    for one in (*each, alone := made(rl_readiness=True, entropy_positions=4)[0]):
        observe(one, logits, target)
    end(each)
    end([alone])
    ((values, _),), ((expected, _),) = read(each), read([alone])
    assert values.scalars == expected.scalars


def test_entropy_that_one_rank_does_not_have_is_not_that_of_all() -> None:
    each = made(2, rl_readiness=True)
    logits = torch.randn(4, 9, 50)
    observe(each[0], logits, labels(0))
    give(each[1], labels(1))
    end(each)
    ((values, _),) = read(each)
    assert ENTROPY not in values.scalars and EFFICIENCY in values.scalars


def test_why_there_is_no_entropy() -> None:
    (one,) = each = made(rl_readiness=True)
    give(one, labels(0))
    one.entropy.cannot_observe("the outputs are inside of a compiled model")
    end(each, 1)
    give(one, labels(0))
    end(each, 2)
    (first, _), (second, _) = read(each)
    assert first.unavailable[ENTROPY] == "the outputs are inside of a compiled model"
    assert "observe_output" in second.unavailable[ENTROPY]


def test_a_trend_needs_twenty_steps() -> None:
    (one,) = each = made(rl_readiness=True, entropy_positions=1000)
    target = labels(0, ignored=0)
    exact = []
    for step in range(1, 21):
        words = 1 + step * step
        exact.append(math.log(words))  # of words that are all alike
        observe(one, torch.zeros(4, 9, words), target)
        end(each, step)
    found = read(each)
    assert [values.scalars[ENTROPY] for values, _ in found] == pytest.approx(exact, rel=1e-5)
    told = [step for step, (values, _) in enumerate(found, 1) if "health/entropy_trend" in values.scalars]
    assert told == [20]
