"""Counts of tokens against a loop in plain Python."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.signals.test_entropy import Watch

from palingenesis.signals.packet import Packet
from palingenesis.signals.tokens import EFFICIENCY, PADDING, WINDOW, Tokens
from palingenesis.signals.values import Values


def read(tokens: Tokens) -> Values:
    tokens.end_step()
    return tokens.decode(Packet(tokens.compute()).arrays())


def labelled(*rows: str) -> torch.Tensor:
    """``.`` bears no loss, anything else does."""
    return torch.tensor([[-100 if mark == "." else 7 for mark in row] for row in rows])


def masked(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(mark != "_") for mark in row] for row in rows])


def test_loss_bearing_over_all_and_padding_over_masked() -> None:
    tokens = Tokens()
    tokens.batch(labelled("..xx", "xxx."), masked("oooo", "ooo_"))
    values = read(tokens).scalars
    # The first label of a row is nobody's target.
    assert values == {EFFICIENCY: 4 / 8, PADDING: pytest.approx(100 / 8)}
    tokens = Tokens()
    tokens.batch(labelled("..xx", "xxx."), shifted=True)
    values = read(tokens)
    assert values.scalars == {EFFICIENCY: 5 / 8}
    assert "no attention mask" in values.unavailable[PADDING]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 10**6)
)
def test_like_a_loop(shapes: list[tuple[int, int]], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = Tokens()
    bearing, every, padding = [], 0, 0
    for rows, length in shapes:
        labels = torch.randint(0, 2, (rows, length), generator=random) * -100
        mask = torch.randint(0, 2, (rows, length), generator=random)
        tokens.batch(labels, mask.bool() if seed % 2 else mask)
        bearing.append(sum(value != -100 for row in labels.tolist() for value in row[1:]))
        every += rows * length
        padding += sum(value == 0 for row in mask.tolist() for value in row)
    assert [int(one.loss_tokens) for one in tokens.micro_batches] == bearing
    assert [one.rows for one in tokens.micro_batches] == [rows for rows, _ in shapes]
    assert tokens.step_tokens is not None
    assert int(tokens.step_tokens) == sum(bearing)
    values = read(tokens).scalars
    assert values[EFFICIENCY] == pytest.approx(sum(bearing) / every)
    assert values[PADDING] == pytest.approx(100 * padding / every)
    assert tokens.micro_batches == []
    assert tokens.step_tokens is None


def test_the_window_weighs_by_tokens_and_is_bounded() -> None:
    tokens = Tokens()
    tokens.batch(labelled("xx"), masked("oo"))
    read(tokens)
    tokens.batch(labelled("." * 30), masked("o" * 15 + "_" * 15))
    values = read(tokens).scalars
    assert values == {EFFICIENCY: pytest.approx(1 / 32), PADDING: pytest.approx(1500 / 32)}
    for _ in range(WINDOW):
        tokens.batch(labelled("xxxx"))
        values = read(tokens).scalars
    assert values == {EFFICIENCY: 0.75}


def test_steps_between_two_readings_are_counted() -> None:
    tokens = Tokens()
    for rows in (("xx",), ("..", ".."), ("xxxxxx",)):
        tokens.batch(labelled(*rows))
        tokens.end_step()
    assert read(tokens).scalars[EFFICIENCY] == pytest.approx((1 + 0 + 5) / 12)


def test_batches_that_say_nothing() -> None:
    tokens = Tokens()
    tokens.batch(None, masked("oo"))
    assert tokens.micro_batches == []
    assert set(read(tokens).unavailable) == {EFFICIENCY, PADDING}
    tokens.batch(torch.zeros(0, 4).long())
    assert "empty" in read(tokens).unavailable[EFFICIENCY]
    tokens.batch(labelled("xxx"), torch.ones(1, 1, 3, 3))
    assert PADDING in read(tokens).unavailable


def test_classes_and_packed_rows() -> None:
    """One label an example, as a classifier has; one long row without a batch dimension."""
    tokens = Tokens()
    tokens.batch(torch.tensor([0, 1, -100, 1]), shifted=True)
    assert read(tokens).scalars == {EFFICIENCY: 3 / 4}
    tokens = Tokens()
    tokens.batch(labelled("x..x")[0])
    assert [(int(one.loss_tokens), one.rows) for one in tokens.micro_batches] == [(1, 1)]


def test_nothing_is_read_on_the_host_and_counts_are_exact_past_single_precision() -> None:
    tokens = Tokens()
    labels = torch.zeros(1, 1).long().expand(1 << 8, (1 << 16) + 2)
    with Watch():
        tokens.batch(labels[:2], torch.ones(2, 4))
        total = tokens.step_tokens
        tokens.compute()
    assert total is not None
    tokens.batch(labels)
    assert tokens.compute()["tokens"].tolist() == [(1 << 8) * ((1 << 16) + 1), labels.numel(), 0, 0]


def test_the_window_survives_a_restart() -> None:
    first, second = Tokens(), Tokens()
    first.batch(labelled("xx.."), masked("ooo_"))
    read(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for tokens in (first, second):
        tokens.batch(labelled("xxxx"))
    assert read(first) == read(second)
