"""What several ranks change."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.preflight.memory.made import config, llama

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory import Estimate, estimate_memory

FSDP = {"parallel__strategy": "fsdp2"}


def over(ranks: int, **options: Any) -> Estimate:
    return estimate_memory(config(data__max_seq_length=16, **options), described=llama(), world_size=ranks)


def test_ddp_adds_buckets_of_all_gradients_and_splits_nothing() -> None:
    one, two = over(1), over(2)
    assert two.use.made_of["communication"] == two.sizes.trained
    assert two.use.peak == one.use.peak + two.sizes.trained


@pytest.mark.parametrize("ranks", [2, 8])
def test_fsdp_splits_weights_gradients_and_states(ranks: int) -> None:
    alone = over(1, train__gradient_accumulation_steps=1)
    split = over(ranks, **FSDP, train__gradient_accumulation_steps=1)
    # In the optimizer's step nothing is whole.
    phases = {phase.name: size for phase, size in split.use.by_phase.items()}
    whole = {phase.name: size for phase, size in alone.use.by_phase.items()}
    assert phases["OPTIMIZER"] == pytest.approx(whole["OPTIMIZER"] / ranks, rel=0.02)
    assert phases["BACKWARD"] > whole["BACKWARD"] / ranks


def test_a_first_dimension_that_does_not_divide_is_rounded_up() -> None:
    found = over(1).sizes
    assert found.share(2) == pytest.approx(0.5)
    assert found.share(3) > 1 / 3
    assert found.share(10**6) > 1e-5


def test_accumulated_gradients_stay_whole_under_fsdp() -> None:
    several = over(8, **FSDP, train__gradient_accumulation_steps=4)
    assert several.use.made_of["gradients"] >= 0.8 * several.sizes.trained
    short = estimate_memory(several.config, described=several.described, world_size=8, whole=False)
    assert short.use.peak == pytest.approx(several.use.peak, abs=4096)


def test_fsdp_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--world_size"):
        over(1, **FSDP)


def test_more_ranks_reserve_less() -> None:
    two, eight = (over(ranks, **FSDP, train__gradient_accumulation_steps=1) for ranks in (2, 8))
    assert eight.on(None).total <= two.on(None).total
