"""Norms of each micro-batch's own gradient, against gradients computed one micro-batch at a time."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from palingenesis.layers import Layers, find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.microbatch import MicroBatches, MicroBatchNorms
from palingenesis.signals.noise_scale import NoiseScale
from palingenesis.signals.packet import Packet

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Tied embedding, fused attention, two heads, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.shared = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.other_head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, other: bool = False) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.frozen(self.shared(torch.tanh(self.shared(x))))
        return self.other_head(x) if other else self.head(x)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2, 5), generator=generator) for _ in range(count)]


def square_of_each(
    model: nn.Module, losses: Sequence[Callable[[], torch.Tensor]]
) -> tuple[list[float], list[dict[str, float]]]:
    """Squared norms of the gradients of single losses: of everything, and by parameter."""
    by_name = []
    for loss in losses:
        model.zero_grad(set_to_none=True)
        loss().backward()
        by_name.append(
            {
                name: 0.0 if p.grad is None else float(p.grad.double().square().sum())
                for name, p in model.named_parameters()
            }
        )
    model.zero_grad(set_to_none=True)
    return [sum(squares.values()) for squares in by_name], by_name


def hear(
    model: nn.Module,
    losses: Sequence[Callable[[], torch.Tensor]],
    expected: int | None = None,
    scale: torch.Tensor | None = None,
) -> MicroBatches | None:
    hooks = MicroBatchNorms(find_layers(model))
    hooks.arm()
    for loss in losses:
        loss().backward()
    return hooks.collect(expected, scale)


def squares_of(found: MicroBatches | None) -> list[float]:
    assert found is not None
    return found.squares[CPU].tolist()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_squared_norm_a_micro_batch(model: Tied, count: int) -> None:
    """The tied parameter counts once a micro-batch, with the sum of both uses."""
    losses = [lambda ids=ids: model(ids).square().mean() for ids in batches(count)]
    expected, by_name = square_of_each(model, losses)
    found = hear(model, losses, expected=count)
    assert squares_of(found) == pytest.approx(expected, rel=1e-5)
    assert found is not None and found.count == count
    assert found.squares[CPU].dtype is torch.float64
    layers = find_layers(model)
    by_unit: dict[str, float] = {}
    for unit, square in zip(layers.units, found.units[CPU].tolist(), strict=True):
        by_unit[unit.name] = by_unit.get(unit.name, 0.0) + square
    for name, square in by_unit.items():
        assert square == pytest.approx(sum(one[name] for one in by_name), rel=1e-5)


def test_gradients_are_what_they_would_have_been(model: Tied) -> None:
    losses = [lambda ids=ids: model(ids).square().mean() for ids in batches(3)]
    for loss in losses:
        loss().backward()
    without = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hear(model, losses)
    for parameter, before in zip(model.parameters(), without, strict=True):
        assert (parameter.grad is None) == (before is None)
        assert before is None or torch.equal(parameter.grad, before)


def test_parameters_absent_from_some_micro_batches(model: Tied) -> None:
    """Each task's head runs backward first: it belongs to the micro-batch that follows, not to the last."""
    other = [False, True, True, False, True]
    losses = [
        lambda ids=ids, to=to: model(ids, to).square().mean()
        for ids, to in zip(batches(5), other, strict=True)
    ]
    expected, _ = square_of_each(model, losses)
    assert squares_of(hear(model, losses)) == pytest.approx(expected, rel=1e-5)


def test_a_loss_scale(model: Tied) -> None:
    plain = [lambda ids=ids: model(ids).square().mean() for ids in batches(2)]
    scaled = [lambda loss=loss: 4096.0 * loss() for loss in plain]
    expected, by_name = square_of_each(model, plain)
    found = hear(model, scaled, scale=torch.tensor(4096.0))
    assert squares_of(found) == pytest.approx(expected, rel=1e-5)
    assert found is not None
    assert float(found.units[CPU].sum()) == pytest.approx(sum(sum(one.values()) for one in by_name), rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments(reentrant: bool) -> None:
    torch.manual_seed(0)
    body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    data = [torch.randn(3, 8, requires_grad=True) for _ in range(3)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        for layer in body:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=reentrant)
        return x.square().sum()

    losses = [lambda x=x: loss(x) for x in data]
    expected, _ = square_of_each(body, losses)
    assert squares_of(hear(body, losses, expected=3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 30, dtype=dtype)
    losses = [lambda n=n: layer(torch.full((2, 40), 0.1 * n, dtype=dtype)).square().sum() for n in (1, 2)]
    expected, _ = square_of_each(layer, losses)
    assert squares_of(hear(layer, losses)) == pytest.approx(expected, rel=1e-5)


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(20, 4, sparse=True)
    losses = [
        lambda ids=ids: embedding(ids).square().sum() for ids in (torch.tensor([1, 1, 2]), torch.tensor([3]))
    ]
    expected = []
    for loss in losses:
        embedding.zero_grad()
        loss().backward()
        expected.append(float(embedding.weight.grad.to_dense().double().square().sum()))
    embedding.zero_grad()
    assert squares_of(hear(embedding, losses)) == pytest.approx(expected, rel=1e-5)


def test_a_number_of_micro_batches_that_does_not_agree(model: Tied) -> None:
    """Two backward calls over one batch look like two micro-batches; who knows better says so."""
    losses = [lambda ids=ids: model(ids).square().mean() for ids in batches(2)]
    assert hear(model, losses, expected=1) is None
    assert hear(model, [], expected=1) is None
    assert hear(model, []) is None


def test_hooks_are_there_for_one_step_only(model: Tied) -> None:
    hooks = MicroBatchNorms(find_layers(model))
    loss = lambda: model(batches(1)[0]).square().mean()  # noqa: E731
    assert not hooks.armed
    hooks.arm()
    hooks.arm()
    assert hooks.armed
    loss().backward()
    first = squares_of(hooks.collect())
    assert not hooks.armed
    assert len(first) == 1
    assert all(not p._backward_hooks for p in model.parameters())
    model.zero_grad()
    loss().backward()
    assert hooks.collect() is None


def test_copies_made_while_it_listens(model: Tied) -> None:
    hooks = MicroBatchNorms(find_layers(model))
    hooks.arm()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    for other in (copied, pickled, saved):
        assert all(not p._backward_hooks for p in other.parameters())
        other(batches(1)[0]).square().mean().backward()
    assert hooks.collect() is None


def test_a_compiled_module(model: Tied) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    losses = [lambda ids=ids: compiled(ids).square().mean() for ids in batches(3)]
    expected, _ = square_of_each(model, losses)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = hear(compiled, losses, expected=3)
    assert squares_of(found) == pytest.approx(expected, rel=1e-5)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    torch._dynamo.reset()


def test_a_failure_comes_up_when_collecting_not_in_backward(model: Tied) -> None:
    def listener(unit: int, gradient: torch.Tensor) -> None:
        raise RuntimeError("no room")

    hooks = MicroBatchNorms(find_layers(model))
    hooks.arm(listener)
    model(batches(1)[0]).square().mean().backward()
    assert model.embed.weight.grad is not None
    with pytest.raises(RuntimeError, match="no room"):
        hooks.collect()
    assert not hooks.armed
    assert hooks.collect() is None


def test_gradient_release() -> None:
    """Gradients are freed inside backward; norms and cosine come from the hooks all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    reference = copy.deepcopy(model)
    layers = find_layers(model)
    hooks, cosine = MicroBatchNorms(layers), GradientCosine(layers)

    def release(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(release)
    kept = []
    for step in (1, 2):
        data = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        reference(data).square().mean().backward()
        kept.append([p.grad.clone() for p in reference.parameters()])
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        cosine.listen(step)
        hooks.arm(cosine.feed)
        model(data).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        found = hooks.collect(expected=1)
        assert found is not None
        exact = [float(g.double().square().sum()) for g in kept[-1]]
        assert found.units[CPU].tolist() == pytest.approx(exact, rel=1e-5)
        norms = {CPU: found.units[CPU].sqrt()}
        if step == 1:
            cosine.arm(step, norms)
    arrays = Packet(cosine.compute(2, norms)).arrays()
    x, y = (torch.cat([g.flatten() for g in one]).double() for one in kept)
    truth = float(x @ y / (x.norm() * y.norm()))
    assert cosine.decode(arrays).scalars["health/grad_cosine_sim"] == pytest.approx(truth, abs=0.02)


def test_create_graph_and_a_layer_list_that_is_empty() -> None:
    layer = nn.Linear(3, 3)
    hooks = MicroBatchNorms(find_layers(layer))
    hooks.arm()
    (gradient,) = torch.autograd.grad(layer(torch.ones(1, 3)).square().sum(), layer.weight, create_graph=True)
    gradient.square().sum().backward()
    hooks.collect()
    nothing = MicroBatchNorms(Layers((), (), (), ()))
    nothing.arm()
    assert nothing.collect() is None


@pytest.mark.parametrize("counts", [[20, 20, 20], [4, 16, 40]], ids=["equal", "unequal"])
def test_the_noise_scale_of_real_accumulations(counts: list[int]) -> None:
    """Linear regression with B four times the batch, through backward and hooks: the interval covers it."""
    dims, right = 200, 4.0 * sum(counts)
    sigma = ((right - dims - 1) / dims) ** 0.5
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(dims, 1, bias=False)
    with torch.no_grad():  # never stepped: every step's gradient has the same expectation
        layer.weight.zero_()[0, 0] = 1.0
    hooks = MicroBatchNorms(find_layers(layer))
    told, covers = 0, 0
    for _ in range(60):
        scale = NoiseScale()
        for step in range(20):
            layer.zero_grad()
            hooks.arm()
            for count in counts:
                x = torch.randn(count, dims, generator=generator)
                y = sigma * torch.randn(count, 1, generator=generator)
                ((layer(x) - y).square().sum() / 2 / sum(counts)).backward()
            heard = hooks.collect(expected=len(counts))
            assert heard is not None
            whole = float(layer.weight.grad.double().square().sum())
            scale.add_parts(step, "microbatch", heard.squares[CPU].tolist(), whole, tokens=counts)
        values, labels = scale.values()
        assert labels == {"health/gns_source": "microbatch"}
        if "health/gns_tokens" in values.scalars:
            told += 1
            off = abs(values.scalars["health/gns_tokens"] - right)
            covers += off <= 1.96 * values.scalars["health/gns_tokens_se"]
    assert told >= 50 and covers >= 0.9 * told


def test_the_noise_scale_of_a_real_accumulation() -> None:
    """Linear regression with known B, through backward and hooks, with unequal micro-batches."""
    dims, counts, sigma = 24, [4, 12, 16], 2.0
    right = dims + 1 + dims * sigma**2
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(dims, 1, bias=False)
    hooks, scale = MicroBatchNorms(find_layers(layer)), NoiseScale()
    found = []
    for step in range(400):
        with torch.no_grad():
            layer.weight.zero_()[0, 0] = 1.0
        layer.zero_grad()
        hooks.arm()
        for count in counts:
            x = torch.randn(count, dims, generator=generator)
            y = sigma * torch.randn(count, 1, generator=generator)
            ((layer(x) - y).square().sum() / 2 / sum(counts)).backward()
        heard = hooks.collect(expected=len(counts))
        assert heard is not None
        found.append((heard.squares[CPU].tolist(), float(layer.weight.grad.double().square().sum())))
        scale.add_parts(step, "microbatch", *found[-1], sequences=counts)
    values, labels = scale.values()
    assert labels == {"health/gns_source": "microbatch"}
    assert abs(values.scalars["health/gns"] - right) <= 1.96 * values.scalars["health/gns_se"]
    assert np.isfinite(values.scalars["health/gns_se"])
