"""What is said of a step on a card, what would make it fit, and how far options can go."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("transformers")

from tests.preflight.memory.made import config, llama

from palingenesis.errors import ConfigError
from palingenesis.findings.catalog import CATALOG
from palingenesis.preflight.memory import Estimate, estimate_memory
from palingenesis.preflight.memory.changes import Budget, Change, free_changes, what_would_fit
from palingenesis.preflight.memory.findings import findings_of
from palingenesis.preflight.memory.gpus import GPUS, gpu_memory
from palingenesis.preflight.memory.limits import LENGTH_STEP, largest_batch, longest_rows
from palingenesis.preflight.memory.picture import draw

LARGE = 10**12
ALL_DAY = 10**6


@cache
def step(rows: int = 2, checkpointing: bool = False) -> Estimate:
    return estimate_memory(
        config(
            data__max_seq_length=512,
            train__per_device_batch_size=rows,
            train__gradient_checkpointing=checkpointing,
        ),
        described=llama(max_position_embeddings=2048),
    )


def test_a_step_that_fits_is_said_to_fit() -> None:
    (found,) = findings_of(step().on(LARGE))
    assert (found.check, found.severity) == ("memory.fits", "info")


def test_without_a_card_nothing_is_said_about_fitting() -> None:
    fit = step().on(None)
    assert findings_of(fit) == ()
    assert (fit.fits, fit.headroom, fit.tight) == (None, None, False)


def test_the_parts_of_the_margin_have_sources_and_add_up() -> None:
    fit = step().on(LARGE)
    assert all(part.source for part in fit.margin)
    assert fit.total == step().use.peak + sum(part.bytes for part in fit.margin)


def test_a_step_that_just_fits_is_tight() -> None:
    fit = step().on(int(step().on(LARGE).total * 1.02))
    assert fit.fits
    (found,) = findings_of(fit)
    assert (found.check, found.severity) == ("memory.tight", "warning")
    assert found.fix


def test_a_step_that_does_not_fit_names_the_cheapest_way_out() -> None:
    total = step().on(LARGE).total
    fit = step().on(total - 10**7)
    tried = what_would_fit(fit, Budget(ALL_DAY))
    assert not fit.fits
    assert [one.fits for one in tried] == [False] * (len(tried) - 1) + [True]
    (found,) = findings_of(fit, tried)
    assert (found.check, found.severity) == ("memory.does_not_fit", "critical")
    assert found.fix.startswith(tried[-1].change.words)
    # What is promised holds.
    again = estimate_memory(tried[-1].change.applied(step().config), described=step().described)
    assert again.on(fit.gpu_bytes).fits


@pytest.mark.slow
def test_where_nothing_helps_that_is_said() -> None:
    fit = step().on(10**6)
    tried = what_would_fit(fit, Budget(ALL_DAY))
    assert not any(one.fits for one in tried)
    (found,) = findings_of(fit, tried)
    assert "nothing tried fits" in found.fix


def test_a_budget_that_is_spent_ends_the_search() -> None:
    budget = Budget(0.0)
    assert what_would_fit(step().on(10**6), budget) == []
    assert "--train.optimizer adamw_8bit" in budget.left_out
    assert len(set(budget.left_out)) == len(budget.left_out)


def test_changes_keep_the_batch_of_a_step() -> None:
    fewer = next(one for one in free_changes(step().config) if "train.per_device_batch_size" in one.options)
    changed = fewer.applied(step().config).train
    assert changed.per_device_batch_size * changed.gradient_accumulation_steps == 4


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    card = step().on(LARGE).total + 60 * 10**6
    limit = largest_batch(step().on(card), Budget(ALL_DAY))
    assert limit.exact
    assert limit.ended_by == "memory"
    assert limit.largest is not None and limit.largest > 2
    fits = [
        estimate_memory(
            Change({"train.per_device_batch_size": rows}, "").applied(step().config),
            described=step().described,
        )
        .on(card)
        .fits
        for rows in (limit.largest, limit.largest + 1)
    ]
    assert fits == [True, False]


def test_the_longest_rows_end_at_the_models_positions() -> None:
    limit = longest_rows(step().on(LARGE), Budget(ALL_DAY))
    assert (limit.largest, limit.exact) == (2048, True)
    small = longest_rows(step().on(step().on(LARGE).total), Budget(ALL_DAY))
    assert small.largest is not None
    assert small.largest % LENGTH_STEP == 0 and 512 <= small.largest < 2048


def test_nothing_fits_a_card_that_is_too_small() -> None:
    assert largest_batch(step().on(10**6), Budget(ALL_DAY)).largest is None


def test_a_batch_with_room_is_offered_with_the_accumulation_that_goes_with_it() -> None:
    fit = step().on(LARGE)
    limit = largest_batch(step().on(step().on(LARGE).total + 60 * 10**6), Budget(ALL_DAY))
    found = {one.check: one for one in findings_of(fit, (), [limit])}
    assert found["memory.room_for_batch"].evidence["rows"] == 4
    assert found["memory.room_for_batch"].evidence["accumulation"] == 1


def test_every_id_is_in_the_catalog() -> None:
    assert {name for name in CATALOG if name.startswith("memory.")} >= {
        "memory.does_not_fit",
        "memory.tight",
        "memory.fits",
        "memory.whole_gradients",
        "memory.room_for_batch",
    }


def test_cards_by_name() -> None:
    assert gpu_memory("A100-80GB") == gpu_memory("a100_80gb") == int(GPUS["a100-80gb"])
    with pytest.raises(ConfigError, match="did you mean h100-80gb"):
        gpu_memory("h100-80")


@pytest.mark.parametrize("plain", [True, False])
def test_the_picture_shows_peak_and_parts(plain: bool) -> None:
    lines = draw(step().use, width=60, height=6, plain=plain).lines
    assert len(lines) == 9
    assert all(len(line) <= 60 for line in lines[:-1])
    assert all(line.isascii() for line in lines) is plain
    parts = lines[-2].split()[-1]
    assert set(parts) <= set("fLbco") and parts[0] == "f" and parts[-1] == "o"


@pytest.mark.parametrize("length", [500, 1000, 8192])
def test_any_length_can_be_where_the_search_begins(length: int) -> None:
    """One that is no multiple of the step, and one beyond the model's positions."""
    made = estimate_memory(
        config(data__max_seq_length=length, train__per_device_batch_size=1),
        described=llama(max_position_embeddings=1024),
    )
    limit = longest_rows(made.on(LARGE), Budget(ALL_DAY))
    assert limit.exact and limit.largest is not None and limit.largest >= 1024
    assert limit.ended_by == "the model's positions"
