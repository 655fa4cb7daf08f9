"""Output entropy against a loop over all positions in double precision."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from palingenesis.signals.entropy import (
    ERROR,
    NAME,
    SMALLEST,
    TREND,
    TREND_VALUES,
    Entropy,
    bears_loss,
    relative_change,
)
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values


def exact(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The entropy of every loss-bearing position, ``[B, T, V]`` and ``[B, T]``, one by one."""
    found = []
    for row, targets in zip(logits.detach().double().numpy(), labels.numpy(), strict=True):
        for z, target in zip(row, targets[1:], strict=False):
            if target != -100:
                p = np.exp(z - z.max())
                p /= p.sum()
                found.append(math.fsum(-x * math.log(x) for x in p.tolist() if x > 0))
    return found


def read(entropy: Entropy) -> Values:
    """What one step comes to; ends the step."""
    values = entropy.decode(Packet(entropy.compute()).arrays())
    entropy.end_step()
    return values


def batch(kind: str, seed: int = 0, rows: int = 4, length: int = 101) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[B, T, V]`` and labels of one kind."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 50, generator=random)
    labels = torch.randint(0, 50, (rows, length), generator=random)
    if kind == "sure and unsure":
        logits = logits * torch.where(torch.rand(rows, length, 1, generator=random) < 0.3, 12.0, 0.5)
    elif kind == "answers only":
        labels[:, : length // 2] = -100
    elif kind == "one row":
        labels[1:] = -100
    elif kind == "surer along the row":
        logits = logits * torch.linspace(0.1, 8, length).view(1, -1, 1)
    return logits, labels


def check_estimates(found: np.ndarray, truth: float) -> None:
    """Pairs of an estimate and its standard error: without bias, and the errors as large as they say."""
    estimates, errors = found.T
    assert abs(estimates.mean() - truth) < 3 * estimates.std() / math.sqrt(len(estimates))
    assert (np.abs(estimates - truth) < 3 * errors).mean() >= 0.98
    assert np.mean(errors**2) == pytest.approx(estimates.var(), rel=0.15)


KINDS = ["plain", "sure and unsure", "answers only", "one row", "surer along the row"]


# -- against the exact computation -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_positions_are_the_exact_mean(kind: str) -> None:
    logits, labels = batch(kind)
    entropy = Entropy(positions=1000)
    entropy.observe_output(logits=logits, labels=labels)
    values = read(entropy).scalars
    assert values[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=1e-6)
    assert values[ERROR] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_unbiased_and_its_error_is_what_it_says(kind: str) -> None:
    logits, labels = batch(kind)
    truth = np.mean(exact(logits, labels))
    found = []
    for seed in range(600):
        entropy = Entropy(positions=64, seed=seed)
        entropy.observe_output(logits=logits, labels=labels)
        values = read(entropy).scalars
        found.append((values[NAME], values[ERROR]))
    check_estimates(np.array(found), truth)


def test_micro_batches_weigh_by_their_positions() -> None:
    """Unequal ones whose entropies differ: a mean of means would be far off."""
    parts = [batch("sure and unsure", 1), batch("one row", 2), batch("answers only", 3, rows=1)]
    parts[1] = (parts[1][0] * 9, parts[1][1])
    every = [exact(*part) for part in parts]
    truth = np.mean(np.concatenate(every))
    of_means = np.mean([np.mean(part) for part in every])
    found = []
    for seed in range(600):
        entropy = Entropy(seed=seed)
        for logits, labels in parts:
            entropy.observe_output(logits=logits, labels=labels)
        values = read(entropy).scalars
        found.append((values[NAME], values[ERROR]))
    check_estimates(np.array(found), truth)
    estimates = np.array(found)[:, 0]
    assert abs(of_means - truth) > 10 * abs(estimates.mean() - truth)


def test_chunks_of_a_batch_are_the_batch() -> None:
    """As a chunked loss hands them over: targets shifted already, cut anywhere."""
    logits, labels = batch("answers only")
    flat, targets = logits[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1)
    entropy = Entropy(positions=1000)
    for chunk, wanted in zip(flat.split(37), targets.split(37), strict=True):
        entropy.observe_output(logits=chunk, labels=wanted, shifted=True)
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=1e-6)


def test_a_kernels_own_entropies_are_used_whole() -> None:
    logits, labels = batch("answers only")
    mask = labels[:, 1:] != -100
    own = torch.distributions.Categorical(logits=logits[:, :-1]).entropy().masked_fill(~mask, 0)
    entropy = Entropy(positions=8)
    entropy.observe_output(entropies=own.requires_grad_(), mask=mask)
    values = read(entropy).scalars
    assert values[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=1e-6)
    assert values[ERROR] == 0.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 7),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_any_shape_and_dtype(
    rows: int, length: int, size: int, dtype: torch.dtype, seed: int, cut: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(rows, length, size, generator=random)).to(dtype)
    labels = torch.randint(0, size, (rows, length), generator=random)
    labels[torch.rand(rows, length, generator=random) < 0.4] = -100
    entropy = Entropy(positions=64)
    entropy.observe_output(logits=logits[:, :-1] if cut else logits, labels=labels)
    every = exact(logits, labels)
    values = read(entropy)
    if every:
        assert values.scalars[NAME] == pytest.approx(np.mean(every), rel=1e-6, abs=1e-6)
        assert values.scalars[ERROR] == 0.0
    else:
        assert values.scalars == {}
        assert NAME in values.unavailable


# -- hidden states and a head ------------------------------------------------------------------------------


def hidden_and_head(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    head = nn.Linear(24, 50, bias=bias, dtype=dtype)
    hidden = 6 * torch.randn(4, 101, 24)
    return hidden.to(dtype), head, batch("answers only")[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 3.0)])
def test_hidden_states_and_head_are_the_logits(bias: bool, scale: float, soft_cap: float | None) -> None:
    hidden, head, labels = hidden_and_head(bias=bias)
    logits = head(hidden) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    by: dict[str, Values] = {}
    for way in ("logits", "module", "weight"):
        entropy = Entropy()
        given: dict[str, Any] = {"hidden": hidden, "scale": scale, "soft_cap": soft_cap}
        if way == "logits":
            given = {"logits": logits}
        elif way == "module":
            given["head"] = head
        else:
            given |= {"head": head.weight, "bias": head.bias}
        entropy.observe_output(labels=labels, **given)
        by[way] = read(entropy)
    # The same seed draws the same positions.
    for way in ("module", "weight"):
        assert by[way].scalars[NAME] == pytest.approx(by["logits"].scalars[NAME], rel=1e-5)
        assert by[way].scalars[ERROR] == pytest.approx(by["logits"].scalars[ERROR], rel=1e-4)
    error = by["module"].scalars[NAME] - np.mean(exact(logits, labels))
    assert abs(error) < 3 * by["module"].scalars[ERROR]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_the_models_own_logits(dtype: torch.dtype) -> None:
    hidden, head, labels = hidden_and_head(dtype=dtype, bias=True)
    entropy = Entropy(positions=1000)
    entropy.observe_output(hidden=hidden, head=head, labels=labels)
    truth = np.mean(exact(head(hidden), labels))
    assert read(entropy).scalars[NAME] == pytest.approx(truth, rel=1e-5)


def test_autocast_hidden_states_with_an_fp32_head() -> None:
    hidden, head, labels = hidden_and_head()
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        entropy = Entropy(positions=1000)
        entropy.observe_output(hidden=hidden.bfloat16(), head=head, labels=labels)
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=2e-3)


def test_a_parametrized_head_counts_with_what_takes_effect() -> None:
    hidden, head, labels = hidden_and_head()

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    parametrize.register_parametrization(head, "weight", Halved())
    entropy = Entropy(positions=1000)
    entropy.observe_output(hidden=hidden, head=head, labels=labels)
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(head(hidden), labels)), rel=1e-6)


# -- what it costs and what it leaves alone ----------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Refuses what would make the host wait for a device, and remembers the largest thing made."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        assert not any(word in name for word in self.WAITING), f"{name} waits for the device"
        if "index.Tensor" in name:
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                "a boolean index waits"
            )
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


def test_the_watch_refuses_a_host_read() -> None:
    with Watch(), pytest.raises(AssertionError, match="waits"):
        torch.ones(2).sum().item()
    with Watch(), pytest.raises(AssertionError, match="waits"):
        torch.ones(2)[torch.ones(2) > 0]


def test_nothing_is_read_on_the_host_and_only_the_sample_is_touched() -> None:
    hidden, head, labels = hidden_and_head()
    logits = head(hidden)
    entropy = Entropy(positions=16)
    with Watch() as watch:
        entropy.observe_output(hidden=hidden, head=head, labels=labels)
        entropy.observe_output(logits=logits[:, :-1], labels=labels)
        entropy.observe_output(entropies=logits.new_ones(4, 101), mask=labels != -100)
        entropy.compute()
    assert watch.largest <= max(16 * 50, labels.numel())


def test_global_random_state_gradients_and_inputs_stay() -> None:
    hidden, head, labels = hidden_and_head()
    hidden.requires_grad_()
    before = (torch.get_rng_state(), hidden.detach().clone(), labels.clone())
    entropy = Entropy()
    entropy.observe_output(hidden=hidden, head=head, labels=labels)
    assert not entropy.compute()["entropy"].requires_grad
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(hidden, before[1])
    assert torch.equal(labels, before[2])
    assert hidden.grad is None
    assert head.weight.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_after(mode: Callable[[], Any]) -> None:
    logits, labels = batch("plain")
    entropy = Entropy(positions=1000)
    with mode():
        entropy.observe_output(logits=logits * 1.0, labels=labels)
    entropy.observe_output(logits=logits, labels=labels)
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_counts_once(reentrant: bool) -> None:
    hidden, head, labels = hidden_and_head()
    entropy, calls = Entropy(positions=1000), []

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        calls.append(1)
        # Twice as much weight as the other half, if recomputation counted.
        entropy.observe_output(logits=logits, labels=labels[:2])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:2].flatten())

    checkpoint(loss, hidden[:2].requires_grad_(), use_reentrant=reentrant).backward()
    assert len(calls) == 2
    entropy.observe_output(logits=head(hidden[2:] * 0.01), labels=labels[2:])
    whole = torch.cat([head(hidden[:2]), head(hidden[2:] * 0.01)])
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(whole, labels)), rel=1e-6)


# -- extremes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "nats"),
    [
        ([0.0] * 8, math.log(8)),
        ([1e4] * 8, math.log(8)),
        ([1e4] + [-1e4] * 7, 0.0),
        ([0.0, 0.0] + [-math.inf] * 6, math.log(2)),
        ([3e38, -3e38] + [0.0] * 6, 0.0),
        ([20.0] + [0.0] * 7, math.log1p(7 * math.exp(-20)) + 140 * math.exp(-20)),
        ([math.nan] + [0.0] * 7, math.nan),
        ([math.inf] + [0.0] * 7, math.nan),
        ([-math.inf] * 8, math.nan),
    ],
)
def test_logits_at_the_edge_of_floating_point(row: list[float], nats: float) -> None:
    entropy = Entropy()
    entropy.observe_output(logits=torch.tensor([row, row]), labels=torch.zeros(2).long(), shifted=True)
    values = read(entropy).scalars
    assert values[NAME] == pytest.approx(nats, rel=1e-5, abs=1e-7, nan_ok=True)


def test_a_position_without_loss_may_hold_anything() -> None:
    logits, labels = batch("answers only")
    spoiled = logits.clone()
    spoiled[:, :20] = math.nan
    entropy = Entropy(positions=1000)
    entropy.observe_output(logits=spoiled, labels=labels)
    assert read(entropy).scalars[NAME] == pytest.approx(np.mean(exact(logits, labels)), rel=1e-6)


# -- what cannot be had ------------------------------------------------------------------------------------

LABELS = torch.zeros(2, 5, dtype=torch.long)
HIDDEN = torch.ones(2, 5, 4)


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def hooked() -> nn.Linear:
    head = nn.Linear(4, 3)
    head.register_forward_hook(lambda module, given, result: result * 2)
    return head


def replaced() -> nn.Linear:
    head = nn.Linear(4, 3)
    head.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return head


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"logits": torch.ones(2, 5, 3)}, "labels are needed"),
        ({"labels": LABELS}, "neither logits, nor hidden states"),
        ({"labels": LABELS, "hidden": HIDDEN}, "neither logits, nor hidden states"),
        ({"labels": LABELS, "logits": torch.ones(2, 7, 3)}, "do not fit labels"),
        ({"labels": LABELS, "logits": torch.ones(2, 4, 3), "shifted": True}, "do not fit labels"),
        ({"labels": LABELS, "logits": torch.ones(3, 5, 3)}, "do not fit labels"),
        ({"labels": LABELS, "logits": torch.ones(2, 5, 3, dtype=torch.long)}, "not floating point"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": Adapted(4, 3)}, "is a Adapted"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": nn.Identity()}, "is a Identity"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": hooked()}, "forward hooks"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": replaced()}, "is a Linear, whose output"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": nn.Linear(6, 3)}, "need [vocabulary, 4]"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": torch.empty(0)}, "need [vocabulary, 4]"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": torch.ones(3, 4, device="meta")}, "on meta"),
        ({"labels": LABELS, "hidden": HIDDEN, "head": torch.ones(3, 4, dtype=torch.int8)}, "torch.int8"),
        ({"entropies": torch.ones(2, 4)}, "mask of their own shape"),
        ({"entropies": torch.ones(2, 4), "mask": torch.ones(2, 5)}, "mask of their own shape"),
    ],
)
def test_what_cannot_be_used_is_told_and_spoils_the_step(given: dict[str, Any], told: str) -> None:
    logits, labels = batch("plain")
    entropy = Entropy()
    entropy.observe_output(logits=logits, labels=labels)
    entropy.observe_output(**given)
    values = read(entropy)
    assert values.scalars == {}
    assert told in values.unavailable[NAME]
    entropy.observe_output(logits=logits, labels=labels)
    assert NAME in read(entropy).scalars


def test_a_step_without_outputs_or_loss_has_no_value() -> None:
    entropy = Entropy()
    assert "no output was observed" in read(entropy).unavailable[NAME]
    entropy.cannot_observe("the weather")
    assert read(entropy).unavailable == {NAME: "the weather"}
    entropy.observe_output(logits=torch.ones(2, 5, 3), labels=torch.full((2, 5), -100))
    assert "bears loss" in read(entropy).unavailable[NAME]
    entropy.observe_output(logits=torch.ones(0, 5, 3), labels=torch.zeros(0, 5).long())
    assert "bears loss" in read(entropy).unavailable[NAME]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 10**6), st.booleans())
def test_which_positions_bear_loss(rows: int, length: int, seed: int, cut: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 3, (rows, length), generator=random)
    labels[labels == -1] = -100
    wanted = [[bool(row[t + 1] != -100) for t in range(length - 1)] for row in labels]
    kept = length - 1 if cut else length
    found = bears_loss(labels, torch.Size([rows, kept]), shifted=False)
    assert found.tolist() == [row + [False] * (kept - len(row)) for row in wanted]
    assert torch.equal(bears_loss(labels, labels.shape, shifted=True), labels != -100)


# -- the trend ---------------------------------------------------------------------------------------------


def decoded(entropy: Entropy, *values: float) -> Values:
    found = Values()
    for value in values:
        found = entropy.decode({"entropy": np.array([10 * value, 10.0, 0.0])})
    return found


def test_the_trend_is_the_relative_change_over_twenty_values() -> None:
    entropy = Entropy()
    halved = [2.0 * 0.5 ** (i / 19) for i in range(TREND_VALUES)]
    assert TREND not in decoded(entropy, *halved[:-1]).scalars
    assert decoded(entropy, halved[-1]).scalars[TREND] == pytest.approx(-0.5)
    assert decoded(entropy, *[1.5] * 20).scalars[TREND] == 0.0
    assert decoded(entropy, *[1.5 * 1.1 ** (i / 19) for i in range(20)]).scalars[TREND] == pytest.approx(0.1)


def test_five_wild_values_and_one_that_is_not_finite_leave_the_trend() -> None:
    falling = [2.0 * 0.5 ** (i / 19) for i in range(20)]
    for where in ([0, 1, 2, 3, 4], [15, 16, 17, 18, 19], [2, 7, 9, 13, 19]):
        wild = [0.0 if i in where else value for i, value in enumerate(falling)]
        assert -0.85 < relative_change(wild) < 0
    entropy = Entropy()
    values = decoded(entropy, *falling, math.nan).scalars
    assert math.isnan(values[NAME])
    assert values[TREND] == pytest.approx(-0.5)


def test_collapse_to_nothing_and_a_noisy_level() -> None:
    collapsed = relative_change([1.0] * 10 + [0.0] * 10)
    assert -1 < collapsed < -0.99
    assert relative_change([SMALLEST / 10] * 20) == 0.0
    random = np.random.default_rng(0)
    noise = [relative_change(2 * (1 + 0.02 * random.standard_normal(20))) for _ in range(400)]
    assert abs(np.mean(noise)) < 0.003
    assert np.std(noise) == pytest.approx(0.8 * 0.02, rel=0.15)


def test_the_trend_survives_a_restart() -> None:
    first, second = Entropy(), Entropy()
    decoded(first, *[2.0 * 0.9**i for i in range(25)])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert decoded(second, 0.5) == decoded(first, 0.5)


# -- a vocabulary split over processes ---------------------------------------------------------------------

WORKER = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from palingenesis.signals.entropy import Entropy

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
hidden, weight, bias = 3 * torch.randn(2, 40, 8), torch.randn(7, 8), torch.randn(7)
labels = torch.randint(0, 7, (2, 40))
logits = hidden @ weight.T + bias
spread = lambda tensor, *placements: distribute_tensor(tensor, mesh, placements)
everywhere = spread(hidden, Replicate())
tiny = torch.randn(2, 40, 1)  # less than one column a process
cases = {
    "whole": dict(logits=logits),
    "logits": dict(logits=spread(logits, Shard(2))),
    "logits, replicated": dict(logits=spread(logits, Replicate())),
    "one column": dict(logits=spread(tiny, Shard(-1))),
    "head": dict(hidden=everywhere, head=spread(weight, Shard(0)), bias=spread(bias, Shard(0))),
    "capped": dict(hidden=everywhere, head=spread(weight, Shard(0)), soft_cap=2.0),
    "capped, whole": dict(hidden=hidden, head=weight, soft_cap=2.0),
    "sharded head, own hidden": dict(hidden=hidden, head=spread(weight, Shard(0))),
    "sharded batch": dict(logits=spread(logits, Shard(0))),
    "sharded hidden": dict(hidden=spread(hidden, Shard(1)), head=weight),
    "head by columns": dict(hidden=everywhere, head=spread(weight, Shard(1))),
}
found = {}
for name, given in cases.items():
    entropy = Entropy(positions=16)
    entropy.observe_output(labels=labels, **given)
    values = entropy.decode({key: sums.numpy() for key, sums in entropy.compute().items()})
    found[name] = [values.scalars, values.unavailable]
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_a_split_vocabulary_is_right_or_unavailable(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        whole = found["whole"][0]
        for name in ("logits", "logits, replicated", "head"):
            assert found[name][0][NAME] == pytest.approx(whole[NAME], rel=1e-5)
            assert found[name][0][ERROR] == pytest.approx(whole[ERROR], rel=1e-4)
        assert found["one column"][0][NAME] == 0.0
        assert found["capped"][0][NAME] == pytest.approx(found["capped, whole"][0][NAME], rel=1e-5)
        for name, told in {
            "sharded head, own hidden": "nothing says that they hold the same hidden states",
            "sharded batch": "split along the vocabulary",
            "sharded hidden": "not replicated",
            "head by columns": "only a split along the vocabulary",
        }.items():
            assert found[name][0] == {}
            assert told in found[name][1][NAME]
