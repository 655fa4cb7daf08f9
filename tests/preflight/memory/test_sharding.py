"""What several ranks change: against real steps, of one rank among made-up ones and of two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from tests.distributed import launch
from tests.distributed.memory_cases import STEPS
from tests.preflight.memory.made import config, llama

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory import Estimate, estimate_memory
from palingenesis.preflight.memory.allocator import reserved
from palingenesis.preflight.memory.measure import peak_on_cpu
from palingenesis.preflight.memory.sharding import BUCKET, buckets

FSDP = {"parallel__strategy": "fsdp2"}
WITHIN = 0.01
#: Of 512 bytes each, as CUDA's allocator rounds.
A_FEW_SCALARS = 8192


def over(ranks: int, described: Any = None, **options: Any) -> Estimate:
    settings = config(**{"data__max_seq_length": 16, **options})
    return estimate_memory(settings, described=described or llama(), world_size=ranks)


def test_ddp_adds_buckets_of_all_gradients_and_splits_nothing() -> None:
    one, two = over(1), over(2)
    assert two.use.made_of["communication"] == pytest.approx(two.sizes.trained, abs=A_FEW_SCALARS)
    assert two.use.peak == one.use.peak + two.use.made_of["communication"]
    assert two.sizes.held == two.sizes.all


def test_a_bucket_is_closed_by_the_parameter_that_reaches_its_limit() -> None:
    half = BUCKET // 2 // 4
    model = nn.ParameterList(nn.Parameter(torch.zeros(count)) for count in (1, half, half, 3))
    assert list(buckets(model)) == [4 * (3 + 2 * half), 4]


@pytest.mark.parametrize(
    ("ranks", "tied", "options"),
    [
        (2, False, {}),
        (3, True, {"train__gradient_accumulation_steps": 1}),
        (2, False, {"train__gradient_checkpointing": True, "model__torch_dtype": "bfloat16"}),
    ],
)
def test_the_estimate_for_fsdp_is_the_measured_peak_of_a_rank(
    ranks: int, tied: bool, options: dict[str, Any]
) -> None:
    settings, described = config(**FSDP, **options), llama(tie_word_embeddings=tied)
    estimated = estimate_memory(settings, described=described, world_size=ranks, on_cuda=False).use.peak
    assert estimated == pytest.approx(peak_on_cpu(settings, described, ranks=ranks), rel=WITHIN)
    assert not dist.is_initialized()


@pytest.mark.parametrize("ranks", [2, 8])
def test_fsdp_splits_weights_gradients_and_states(ranks: int) -> None:
    alone = over(1, train__gradient_accumulation_steps=1)
    split = over(ranks, **FSDP, train__gradient_accumulation_steps=1)
    assert (split.model, split.sizes.all) == (alone.model, alone.sizes.all)
    assert split.sizes.held == pytest.approx(alone.sizes.all / ranks, rel=0.02)
    # In the optimizer's step nothing is whole.
    phases = {phase.name: size for phase, size in split.use.by_phase.items()}
    whole = {phase.name: size for phase, size in alone.use.by_phase.items()}
    assert phases["OPTIMIZER"] == pytest.approx(whole["OPTIMIZER"] / ranks, rel=0.05)
    assert phases["BACKWARD"] > whole["BACKWARD"] / ranks
    assert sum(split.use.made_of.values()) == split.use.peak


def test_a_first_dimension_that_does_not_divide_is_rounded_up() -> None:
    three = over(3, **FSDP)
    assert three.use.made_of["parameters"] > three.sizes.all / 3
    assert three.use.made_of["parameters"] == pytest.approx(three.sizes.all / 3, rel=0.03)


def test_accumulated_gradients_stay_whole_under_fsdp() -> None:
    several = over(8, **FSDP, train__gradient_accumulation_steps=4)
    assert several.use.made_of["gradients"] >= 0.8 * several.sizes.trained
    short = estimate_memory(several.config, described=several.described, world_size=8, whole=False)
    assert short.use.peak == pytest.approx(several.use.peak, abs=A_FEW_SCALARS)


def test_more_ranks_reserve_less_and_streams_reserve_apart() -> None:
    two, eight = (over(ranks, **FSDP, train__gradient_accumulation_steps=1) for ranks in (2, 8))
    assert eight.on(None).total <= two.on(None).total
    together, apart = (reserved(two.trace, apart=each) for each in (False, True))
    assert together is not None and apart is not None and two.use.peak <= together <= apart


def test_fsdp_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--world_size"):
        over(1, **FSDP)


def test_an_optimizer_that_cannot_step_split_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer adafactor fails") as raised:
        over(2, **FSDP, train__optimizer="adafactor")
    assert "\n" not in str(raised.value)
    assert not dist.is_initialized()


def test_a_process_that_is_one_of_several_is_told_so() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(ConfigError, match="run `pgs profile` by itself"):
            over(2, **FSDP)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("name", STEPS)
def test_two_real_processes_take_what_was_estimated(name: str) -> None:
    settings = config(**STEPS[name])
    use = estimate_memory(settings, described=llama(), world_size=2, on_cuda=False).use
    for rank in launch.seen(name, group="memory"):
        assert use.peak == pytest.approx(rank["peak"], rel=1e-3)
        if rank["measured"] is not None:
            assert use.peak == pytest.approx(rank["measured"], rel=WITHIN)
        else:
            for category, size in rank["made_of"].items():
                assert use.made_of[category] == pytest.approx(size, rel=1e-3, abs=A_FEW_SCALARS), category
