"""Chunked statistics against whole logits in double precision, and what may never be whole."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from palingenesis.errors import ConfigError
from palingenesis.sft.token_statistics import TokenStatistics, token_statistics

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 6, 5, 11
TOLERANCE = 1e-5
ROOT = Path(__file__).parents[2]


class Case:
    """Hidden states, head and labels of one shape; ``answers`` says where labels bear loss."""

    def __init__(self, answers: str = "some", rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(rows, length, WIDTH, generator=random)
        self.weight = torch.randn(VOCABULARY, WIDTH, generator=random)
        self.bias = torch.randn(VOCABULARY, generator=random)
        self.labels = torch.randint(0, VOCABULARY, (rows, length), generator=random)
        if answers == "some":
            self.labels[torch.rand(rows, length, generator=random) < 0.4] = -100
        elif answers == "none":
            self.labels[:] = -100
        elif answers == "one":
            self.labels[:] = -100
            self.labels[-1, -1] = 3
        elif answers == "first only":  # the first label is nobody's target
            self.labels[:, 1:] = -100
        # Upstream gradients of the two that have one.
        self.d_log_p = torch.randn(rows, length, generator=random)
        self.d_entropy = torch.randn(rows, length, generator=random)

    def to(self, dtype: torch.dtype) -> Case:
        for name in ("hidden", "weight", "bias"):
            setattr(self, name, getattr(self, name).to(dtype))
        return self

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        return tuple(
            one.detach().to(dtype or one.dtype).requires_grad_()
            for one in (self.hidden, self.weight, self.bias)
        )


def reference(
    hidden: torch.Tensor, labels: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> TokenStatistics:
    """Position by position, in double precision, from the definitions."""
    numbers: dict[tuple[int, int], list[torch.Tensor]] = {}
    for row in range(labels.shape[0]):
        for t in range(labels.shape[1] - 1):
            target = int(labels[row, t + 1])
            if target == -100:
                continue
            z = logits_of(hidden[row, t])
            probs = (z - z.max().detach()).exp()
            probs = probs / probs.sum()
            numbers[row, t] = [
                probs[target].log(),
                -(probs * probs.log()).sum(),
                (probs**2).sum(),
                (z[target] == z.max()).double(),
            ]
    zero = hidden.sum() * 0
    columns = []
    for i in range(4):
        rows = [
            torch.stack([numbers[row, t][i] if (row, t) in numbers else zero for t in range(hidden.shape[1])])
            for row in range(hidden.shape[0])
        ]
        columns.append(torch.stack(rows))
    mask = torch.tensor(
        [[(row, t) in numbers for t in range(hidden.shape[1])] for row in range(hidden.shape[0])]
    )
    return TokenStatistics(columns[0], columns[1], columns[2].detach(), columns[3].detach() > 0.5, mask)


def scalar(case: Case, stats: TokenStatistics) -> torch.Tensor:
    return (stats.log_p * case.d_log_p + stats.entropy * case.d_entropy).sum()


def close(found: torch.Tensor | None, exact: torch.Tensor | None, tolerance: float = TOLERANCE) -> None:
    assert found is not None and exact is not None
    torch.testing.assert_close(found.double(), exact.double(), rtol=tolerance, atol=tolerance)


def check(found: TokenStatistics, exact: TokenStatistics, tolerance: float = TOLERANCE) -> None:
    assert found.mask.equal(exact.mask)
    for name in ("log_p", "entropy", "collision"):
        close(getattr(found, name), getattr(exact, name), tolerance)


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: weight @ h if bias is None else weight @ h + bias


class Called(nn.Linear):
    """A head that is not known to be its weight alone, so it has to be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def module(kind: type[nn.Linear], weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    made = kind(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    return made


# -- values and gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", ["some", "all", "none", "one", "first only"])
@pytest.mark.parametrize(("rows", "length"), [(3, 6), (1, 1), (1, 9), (4, 2)])
@pytest.mark.parametrize("way", ["weight", "linear", "called"])
def test_every_number_of_chunks_gives_the_whole(answers: str, rows: int, length: int, way: str) -> None:
    case = Case(answers, rows, length)
    exact_leaves = case.leaves(torch.float64)
    exact = reference(exact_leaves[0], case.labels, plain(*exact_leaves[1:]))
    scalar(case, exact).backward()
    for chunks in range(1, rows * length + 2):
        hidden, weight, bias = case.leaves()
        head: Any = weight
        if way != "weight":
            head = module(nn.Linear if way == "linear" else Called, weight, bias)
            weight, bias = head.weight, head.bias
        stats = token_statistics(
            hidden, head, case.labels, bias=bias if way == "weight" else None, chunks=chunks
        )
        scalar(case, stats).backward()
        check(stats, exact)
        assert stats.is_top1.equal(exact.is_top1)
        for found, true in zip((hidden, weight, bias), exact_leaves, strict=True):
            close(found.grad, torch.zeros_like(true) if true.grad is None else true.grad)


@pytest.mark.parametrize("way", [nn.Linear, Called])
@pytest.mark.parametrize(("scale", "soft_cap"), [(0.25, None), (1.0, 2.0), (3.0, 1.5)])
def test_scale_and_soft_cap(way: type[nn.Linear], scale: float, soft_cap: float | None) -> None:
    case = Case()
    hidden, weight, bias = case.leaves(torch.float64)

    def logits_of(h: torch.Tensor) -> torch.Tensor:
        z = (weight @ h + bias) * scale
        return z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)

    exact = reference(hidden, case.labels, logits_of)
    scalar(case, exact).backward()
    ours = case.hidden.clone().requires_grad_()
    head = module(way, case.weight, case.bias)
    stats = token_statistics(ours, head, case.labels, chunks=3, scale=scale, soft_cap=soft_cap)
    scalar(case, stats).backward()
    check(stats, exact)
    close(ours.grad, hidden.grad)
    close(head.weight.grad, weight.grad)
    close(head.bias.grad, bias.grad)


@pytest.mark.parametrize("way", [nn.Linear, Called])
def test_gradients_against_finite_differences(way: type[nn.Linear]) -> None:
    case = Case(rows=2, length=4).to(torch.float64)
    head = module(way, case.weight, case.bias)

    def function(hidden: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stats = token_statistics(hidden, head, case.labels, chunks=2, scale=0.7, soft_cap=4.0)
        return stats.log_p, stats.entropy

    hidden = case.hidden.requires_grad_()
    assert torch.autograd.gradcheck(function, (hidden, head.weight, head.bias))


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("how", ["class", "instance", "hook", "input hook", "parametrization"])
def test_a_head_that_does_more_than_its_weight_is_called(how: str) -> None:
    case = Case("all")
    head = module(Doubling if how == "class" else nn.Linear, case.weight, case.bias * 0)
    if how == "instance":
        own = head.forward
        head.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    elif how == "hook":
        head.register_forward_hook(lambda *given: 2 * given[-1])
    elif how == "input hook":
        head.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    elif how == "parametrization":

        class Twice(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

        parametrize.register_parametrization(head, "weight", Twice())
    exact = case.weight.double().requires_grad_()
    stats = reference(case.hidden.double(), case.labels, lambda h: 2 * exact @ h)
    scalar(case, stats).backward()
    found = token_statistics(case.hidden, head, case.labels, chunks=3)
    scalar(case, found).backward()
    check(found, stats)
    trained = head.parametrizations.weight.original if how == "parametrization" else head.weight
    close(trained.grad, exact.grad)


def test_a_backward_pass_under_autocast_is_the_same() -> None:
    case = Case("all")
    grads = []
    for enabled in (False, True):
        head = module(nn.Linear, case.weight, case.bias)
        loss = scalar(case, token_statistics(case.hidden, head, case.labels, chunks=2))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss.backward()
        grads.append(head.weight.grad)
    close(grads[1], grads[0], 0.0)


@pytest.mark.parametrize("way", [nn.Linear, Called])
def test_the_graph_can_be_gone_through_twice(way: type[nn.Linear]) -> None:
    case = Case()
    head = module(way, case.weight, case.bias)
    loss = scalar(case, token_statistics(case.hidden, head, case.labels, chunks=2, soft_cap=3.0))
    (first,) = torch.autograd.grad(loss, head.weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, head.weight)
    assert torch.equal(first, second)


def test_extreme_logits_leave_numbers() -> None:
    """One target is certain, one has a probability of zero, one a vocabulary with forbidden tokens."""
    hidden = torch.eye(3).unsqueeze(0).requires_grad_()
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 4], logits[1, 4], logits[2, 6:] = 500.0, -500.0, -torch.inf
    head = Called(3, VOCABULARY, bias=False)
    head.register_forward_hook(lambda _, x, out: logits[x[0].argmax(-1)] + 0 * out)
    stats = token_statistics(hidden, head, torch.full((1, 3), 4), chunks=2, shifted=True)
    (stats.log_p + stats.entropy).sum().backward()
    assert stats.log_p[0].tolist() == pytest.approx([0.0, -500 - math.log(10), -math.log(6)])
    assert stats.entropy[0].tolist() == pytest.approx([0.0, math.log(10), math.log(6)], abs=1e-6)
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("chunks", [1, 4, 64])
def test_bf16_is_as_near_as_unchunked_bf16(chunks: int) -> None:
    """Values and gradients are no farther from the truth than what whole bf16 logits give."""
    case = Case("all", rows=8, length=32).to(torch.bfloat16)
    exact_leaves = case.leaves(torch.float64)
    exact = reference(exact_leaves[0], case.labels, plain(*exact_leaves[1:]))
    (-exact.log_p.sum()).backward()
    whole, ours = case.leaves(), case.leaves()
    logits = nn.functional.linear(whole[0][:, :-1], whole[1], whole[2]).float()
    nn.functional.cross_entropy(
        logits.flatten(0, 1), case.labels[:, 1:].flatten(), reduction="sum"
    ).backward()
    stats = token_statistics(ours[0], ours[1], case.labels, bias=ours[2], chunks=chunks)
    assert stats.log_p.dtype == torch.float32
    (-stats.log_p.sum()).backward()
    for found, unchunked, true in zip(ours, whole, exact_leaves, strict=True):
        assert found.grad is not None and unchunked.grad is not None and true.grad is not None
        error = (found.grad - true.grad).norm() / true.grad.norm()
        assert error <= 1.2 * (unchunked.grad - true.grad).norm() / true.grad.norm() + 3e-4
        close(found.grad, unchunked.grad, 2e-2 * float(true.grad.abs().max()))


@pytest.mark.parametrize("way", [nn.Linear, Called])
def test_autocast_does_what_it_does_to_whole_logits(way: type[nn.Linear]) -> None:
    case = Case("all", rows=4, length=16)
    head, whole = module(way, case.weight, case.bias), module(way, case.weight, case.bias)
    ours, theirs = case.hidden.clone().requires_grad_(), case.hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        stats = token_statistics(ours, head, case.labels, chunks=3)
        logits = whole(theirs[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), case.labels[:, 1:].flatten(), reduction="sum"
        )
        assert logits.dtype == torch.bfloat16
        close(-stats.log_p.sum(), loss)  # the same rounding of the same logits
        (-stats.log_p.sum()).backward()  # also with autocast on
    loss.backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32
    for found, true in ((ours, theirs), (head.weight, whole.weight), (head.bias, whole.bias)):
        assert found.grad is not None and true.grad is not None
        close(found.grad, true.grad, 1e-2 * float(true.grad.abs().max()))


def test_logits_to_keep_and_shifted_labels() -> None:
    case = Case()
    case.labels[:, :3] = -100
    whole = token_statistics(case.hidden, case.weight, case.labels, chunks=2)
    last = token_statistics(case.hidden[:, -4:], case.weight, case.labels, chunks=2, logits_to_keep=4)
    assert torch.equal(last.log_p, whole.log_p[:, -4:]) and torch.equal(last.mask, whole.mask[:, -4:])
    assert not whole.mask[:, :2].any()
    kept = torch.tensor([2, 3, 4])
    some = token_statistics(case.hidden[:, kept], case.weight, case.labels, chunks=2, logits_to_keep=kept)
    assert torch.equal(some.log_p, whole.log_p[:, kept])
    nought = token_statistics(case.hidden, case.weight, case.labels, chunks=2, logits_to_keep=0)
    assert torch.equal(nought.log_p, whole.log_p)
    targets = torch.cat([case.labels[:, 1:], torch.full((ROWS, 1), -100)], 1)
    shifted = token_statistics(case.hidden, case.weight, targets, chunks=2, shifted=True)
    assert torch.equal(shifted.log_p, whole.log_p)
    with pytest.raises(ConfigError, match="leaves out positions that bear loss"):
        token_statistics(case.hidden[:, -2:], case.weight, case.labels, chunks=2, logits_to_keep=2)
    twice, labels = torch.tensor([2, 3, 4, 4]), torch.ones_like(case.labels)
    labels[:, :3] = -100
    with pytest.raises(ConfigError, match="keeps one twice"):
        token_statistics(case.hidden[:, twice], case.weight, labels, chunks=2, logits_to_keep=twice)


@pytest.mark.parametrize("chunks", [1, 3])
def test_tied_embeddings_get_both_gradients(chunks: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH)
    tokens = torch.randint(0, VOCABULARY, (2, 7))
    exact = table.double().requires_grad_()
    reference(exact[tokens].tanh(), tokens, plain(exact)).log_p.sum().backward()
    ours = nn.Parameter(table.clone())
    token_statistics(ours[tokens].tanh(), ours, tokens, chunks=chunks).log_p.sum().backward()
    close(ours.grad, exact.grad)


def test_what_is_frozen_gets_nothing() -> None:
    case = Case()
    for way in (nn.Linear, Called):
        head = module(way, case.weight, case.bias).requires_grad_(False)
        hidden = case.hidden.clone().requires_grad_()
        token_statistics(hidden, head, case.labels, chunks=2).log_p.sum().backward()
        assert head.weight.grad is None and hidden.grad is not None
        head.requires_grad_(True)
        token_statistics(case.hidden, head, case.labels, chunks=2).log_p.sum().backward()
        assert head.weight.grad is not None
        with torch.no_grad():
            assert not token_statistics(hidden, head, case.labels, chunks=2).log_p.requires_grad


def test_an_adapter_on_the_head() -> None:
    """LoRA through the real peft module: also with a scale, a bias and a frozen base."""
    from peft import LoraConfig, inject_adapter_in_model

    class Model(nn.Module):
        def __init__(self, case: Case) -> None:
            super().__init__()
            self.lm_head = module(nn.Linear, case.weight, case.bias)

    case = Case("all")
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["lm_head"], init_lora_weights=False)
    head: Any = inject_adapter_in_model(config, Model(case)).lm_head
    a, b = (getattr(head, name)["default"].weight for name in ("lora_A", "lora_B"))
    hidden = case.hidden.double().requires_grad_()
    exact_a, exact_b = (one.detach().double().requires_grad_() for one in (a, b))
    effective = case.weight.double() + 3.0 * exact_b @ exact_a
    exact = reference(hidden, case.labels, plain(effective, case.bias.double()))
    scalar(case, exact).backward()
    for chunks in (1, 2, 5):
        head.zero_grad()
        ours = case.hidden.clone().requires_grad_()
        stats = token_statistics(ours, head, case.labels, chunks=chunks)
        scalar(case, stats).backward()
        check(stats, exact)
        close(ours.grad, hidden.grad)
        close(a.grad, exact_a.grad)
        close(b.grad, exact_b.grad)
        assert head.base_layer.weight.grad is None


# -- what is refused ---------------------------------------------------------------------------------------


def test_dropout_in_the_head_would_depend_on_the_chunks() -> None:
    case = Case()
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCABULARY))
    with pytest.raises(ConfigError, match=r"active dropout in '0'.*set that dropout to 0"):
        token_statistics(case.hidden, head, case.labels, chunks=2)
    token_statistics(case.hidden, head, case.labels, chunks=1)
    token_statistics(case.hidden, head.eval(), case.labels, chunks=2)


def test_bad_input_is_told_in_one_line() -> None:
    case = Case()
    good: dict[str, Any] = {
        "hidden": case.hidden,
        "head": case.weight,
        "labels": case.labels,
        "chunks": 2,
    }
    too_large = case.labels.clone()
    too_large[0, 1] = VOCABULARY
    negative = case.labels.clone()
    negative[0, 1] = -1
    for change, message in (
        ({"chunks": 0}, "chunks=0"),
        ({"chunks": True}, "chunks=True"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"labels": case.labels[:, :-1]}, "do not fit labels"),
        ({"head": case.weight[:, :-1]}, "need \\[vocabulary, 5\\]"),
        ({"head": case.weight.flatten()}, "DeepSpeed or FSDP1"),
        ({"head": case.weight.bfloat16()}, "cast one of them"),
        ({"head": nn.Linear(WIDTH, VOCABULARY), "bias": case.bias}, "leave it out"),
        ({"labels": too_large}, "labels hold 11 where the LM head has 11 outputs"),
        ({"labels": negative}, "labels hold -1"),
        ({"labels": too_large, "head": Called(WIDTH, VOCABULARY)}, "labels hold 11"),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            token_statistics(**{**good, **change})
        assert "\n" not in str(raised.value)


# -- memory ------------------------------------------------------------------------------------------------


class Tracker(TorchDispatchMode):
    """The largest tensor that any operation returns, and the most that live at once, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.largest = max(self.largest, one.numel())
                self._live[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes() // 4,
                )
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


@pytest.mark.parametrize("way", [nn.Linear, Called])
def test_the_largest_tensor_is_a_chunk_of_logits(way: type[nn.Linear]) -> None:
    positions, width, vocabulary = 512, 4, 1000
    torch.manual_seed(0)
    hidden = torch.randn(1, positions, width, requires_grad=True)
    head = way(width, vocabulary)
    labels = torch.randint(0, vocabulary, (1, positions))

    def tracked(chunks: int) -> Tracker:
        with Tracker() as tracker:
            stats = token_statistics(hidden, head, labels, chunks=chunks, shifted=True, soft_cap=5.0)
            (stats.log_p.sum() + stats.entropy.sum()).backward()
        return tracker

    for chunks in (1, 2, 8, 16):
        tracker = tracked(chunks)
        one_chunk = positions // chunks * vocabulary
        assert tracker.largest == one_chunk
        # Logits, log-probabilities, probabilities and the slope of the cap; and what no chunk changes.
        assert tracker.peak < 4.1 * one_chunk + 4 * vocabulary * width + 16 * positions * width


def test_positions_without_loss_cost_nothing() -> None:
    labels = torch.full((1, 512), -100)
    labels[0, -8:] = 1
    hidden = torch.randn(1, 512, 4, requires_grad=True)
    with Tracker() as tracker:
        token_statistics(hidden, torch.randn(1000, 4), labels, chunks=2).log_p.sum().backward()
    assert tracker.largest == 4 * 1000


# -- several processes -------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model whose forward takes the statistics inside; the head may be called or its weight used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, chunks: int) -> torch.Tensor:
        stats = token_statistics(self.body(x).tanh(), self.head, labels, chunks=chunks)
        return -stats.log_p.sum() + 0.1 * stats.entropy.sum()


def worker(folder: Path) -> None:
    """On two ranks with different batches, one of which bears no loss in its second half."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases = [Case("all", seed=1), Case("one", seed=2)]
    torch.manual_seed(0)
    model = Tiny()
    exact = copy.deepcopy(model).double()
    for case in cases:
        hidden = exact.body(case.hidden.double()).tanh()
        stats = reference(hidden, case.labels, plain(exact.head.weight, exact.head.bias))
        (-stats.log_p.sum() + 0.1 * stats.entropy.sum()).backward()
    found: dict[str, float | str] = {}
    for name, units in (("root", ()), ("own", ("head",)), ("all", ("body", "head"))):
        sharded = copy.deepcopy(model)
        for unit in units:
            fully_shard(getattr(sharded, unit))
        fully_shard(sharded)
        case = cases[rank]
        (sharded(case.hidden, case.labels, 3) * ranks).backward()
        worst = 0.0
        for one, true in zip(sharded.parameters(), exact.parameters(), strict=True):
            assert isinstance(one.grad, DTensor) and true.grad is not None
            worst = max(worst, float((one.grad.full_tensor() - true.grad).abs().max()))
        found[name] = worst
    sharded = copy.deepcopy(model)
    fully_shard(sharded)
    for what, head in (("module", sharded.head), ("weight", sharded.head.weight)):
        try:
            token_statistics(cases[0].hidden, head, cases[0].labels, chunks=2)
        except ConfigError as error:
            found[what] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_sharded_heads(tmp_path: Path) -> None:
    """FSDP2 with the head in the root's group, in its own, and outside the forward, which is refused."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(__file__, str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("root", "own", "all"):
            assert found[name] < TOLERANCE
        assert "inside the forward" in found["module"]
        assert "inside the forward" in found["weight"]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
