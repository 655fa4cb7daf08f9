"""Layers of linear attention: the loop as it is measured, the kernels as arithmetic says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.preflight.memory.made import config, made

from palingenesis.findings.catalog import CATALOG
from palingenesis.preflight.memory import Estimate, estimate_memory
from palingenesis.preflight.memory.categories import Phase
from palingenesis.preflight.memory.changes import Budget, without_kernels
from palingenesis.preflight.memory.findings import findings_of
from palingenesis.preflight.memory.linear_attention import (
    CHUNK,
    LOOP,
    _convolution,
    _delta_rule,
    _pieces,
    linear_layers,
)
from palingenesis.preflight.memory.measure import peak_on_cpu
from palingenesis.preflight.memory.storages import StorageLog

WITHIN = 0.01
LONG = 2 * LOOP * CHUNK
HEADS, GROUPS, KEY, VALUE = 4, 2, 32, 16


def qwen(**changed: Any) -> Any:
    return made(
        "qwen3_5_text",
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=GROUPS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        **changed,
    )


def estimated(length: int = 128, **options: Any) -> Estimate:
    return estimate_memory(config(data__max_seq_length=length, **options), described=qwen())


@pytest.mark.parametrize("options", [{}, {"train__gradient_checkpointing": True}])
def test_the_loop_over_pieces_takes_what_the_real_loop_takes(options: dict[str, Any]) -> None:
    settings = config(data__max_seq_length=LONG, train__gradient_accumulation_steps=1, **options)
    assert _pieces(LONG) > 1
    found = estimate_memory(settings, described=qwen(), on_cuda=False)
    assert found.use.peak == pytest.approx(peak_on_cpu(settings, qwen()), rel=WITHIN)


@pytest.mark.parametrize("length", [64, 1000, LONG, LONG + 1, 8192, 12_345])
def test_pieces_have_the_chunks_of_the_row(length: int) -> None:
    pieces, chunks = _pieces(length), -(-length // CHUNK)
    assert length % pieces == 0
    assert -(-length // pieces // CHUNK) * pieces == chunks
    assert pieces == 1 or chunks // pieces >= LOOP


def sides(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decays in fp32 and betas, as they lie: queries to values side by side."""
    mixed = torch.zeros(rows, length, 2 * GROUPS * KEY + HEADS * VALUE, dtype=torch.bfloat16)
    query, key, value = mixed.requires_grad_().split([GROUPS * KEY, GROUPS * KEY, HEADS * VALUE], dim=-1)
    return (
        query.reshape(rows, length, GROUPS, KEY),
        key.reshape(rows, length, GROUPS, KEY),
        value.reshape(rows, length, HEADS, VALUE),
        torch.zeros(rows, length, HEADS, requires_grad=True),
        torch.zeros(rows, length, HEADS, dtype=torch.bfloat16, requires_grad=True),
    )


def test_what_the_kernels_keep_and_make_is_what_arithmetic_says() -> None:
    rows, length = 2, 200
    chunks, tokens = 4, rows * length
    given = sides(rows, length)
    with StorageLog() as log:
        log.phase = Phase.FORWARD
        found, state = _delta_rule(*given, use_qk_l2norm_in_kernel=True)
    sizes = torch.tensor([size for _, size, *_ in log.rows])
    queries, values, solved = (
        2 * tokens * GROUPS * KEY,
        2 * tokens * HEADS * VALUE,
        2 * tokens * HEADS * CHUNK,
    )
    norms, decays = 2 * 4 * tokens * GROUPS, 4 * tokens * HEADS
    kept = 2 * queries + values + norms + decays + solved
    assert int(sizes.sum()) == kept + values  # what comes out is a value a head
    inner = 2 * tokens * HEADS * KEY + 2 * values + 2 * rows * chunks * HEADS * KEY * VALUE
    copies = 2 * queries  # of queries and keys, for they do not lie by themselves
    assert int(sizes.cumsum(0).max()) == kept + values + inner + copies
    assert state is None and found.shape == given[2].shape
    found.sum().backward()


def test_packed_documents_end_in_chunks_of_their_own() -> None:
    given = sides(1, 256)

    def most(bounds: torch.Tensor | None) -> int:
        with StorageLog() as log:
            _delta_rule(*given, cu_seqlens=bounds)
        return int(torch.tensor([size for _, size, *_ in log.rows]).cumsum(0).max())

    further = 2  # three documents: two more may end in a chunk that is not full
    assert most(torch.tensor([0, 10, 20, 256])) - most(None) == further * 2 * HEADS * KEY * VALUE


def test_a_convolution_keeps_what_it_is_given() -> None:
    given, weight = torch.zeros(1, 64, 12, requires_grad=True), torch.zeros(12, 4, requires_grad=True)
    hidden = given.transpose(1, 2)
    with StorageLog() as log:
        found = _convolution(hidden, weight)
    assert [size for _, size, *_ in log.rows] == [given.numel() * 4]
    found.sum().backward()
    assert given.grad is not None and weight.grad is not None


def test_long_rows_take_no_more_operations_than_short_ones() -> None:
    short, long = estimated(256), estimated(8192)
    assert len(long.trace.rows) == pytest.approx(len(short.trace.rows), rel=0.02)
    assert long.use.peak > 10 * short.use.peak


@cache
def both_ways() -> tuple[Estimate, Estimate]:
    step = estimated(512)
    without = without_kernels(step.on(None), Budget(1e6))
    assert without is not None
    return step, without.estimate


def test_kernels_take_less_and_keep_packed_documents_apart() -> None:
    step, without = both_ways()
    assert without.use.peak > 1.3 * step.use.peak
    packed = estimated(128, data__packing=True)
    assert without_kernels(packed.on(10**12), Budget(1e6)) is None
    (found,) = (one for one in findings_of(packed.on(None)) if one.check == "memory.linear_attention")
    assert "packed rows cannot be trained" in found.message and found.severity == "info"


def test_it_is_said_what_is_counted_on() -> None:
    assert linear_layers(qwen()) == 2 and linear_layers(made("llama")) == 0
    step, without = both_ways()
    between = (step.on(None).total + without.on(None).total) // 2
    severities = {}
    for card in (10**12, between):
        found = {one.check: one for one in findings_of(step.on(card), without=without.on(card))}
        severities[card] = found["memory.linear_attention"].severity
    assert severities == {10**12: "info", between: "warning"}
    assert "memory.linear_attention" in CATALOG
    assert not any(one.check == "memory.linear_attention" for one in findings_of(_llama().on(None)))


def _llama() -> Estimate:
    return estimate_memory(config(data__max_seq_length=16), described=made("llama"))
