"""Cosines of consecutive gradients against the same in double precision over every element."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis.layers import Layers, block_of, find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values

CPU = torch.device("cpu")
TOLERANCE = 0.02
SIM = "health/grad_cosine_sim"

Gradients = dict[str, torch.Tensor]


class Model(nn.Module):
    """An embedding, three blocks and a head: 1.9 M parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(6000, 128, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(128, dtype=dtype),
                nn.Linear(128, 512, dtype=dtype),
                nn.Linear(512, 128, dtype=dtype),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(128, 6000, dtype=dtype)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def normals(model: nn.Module, seed: int) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def mix(rho: float, x: Gradients, y: Gradients) -> Gradients:
    """A gradient with cosine about ``rho`` to ``x``."""
    return {name: rho * x[name] + (1 - rho**2) ** 0.5 * y[name] for name in x}


def outer(model: nn.Module, seed: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, p in model.named_parameters():
        rest = p.shape[1:].numel()
        left, right = torch.randn(len(p), generator=generator), torch.randn(rest, generator=generator)
        found[name] = torch.outer(left, activation(right)).reshape(p.shape)
    return found


def of_tokens(model: nn.Module, seed: int) -> Gradients:
    """Embedding rows of a few tokens dominate everything."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: 1e-2 * gradient for name, gradient in normals(model, seed).items()}
    tokens = torch.cat([torch.arange(0, 60), torch.randint(60, 6000, (40,), generator=generator)])
    found["embed.weight"] = torch.zeros(6000, 128)
    found["embed.weight"][tokens] = 3 * torch.randn(100, 128, generator=generator)
    found["embed.weight"][:60] += 2.0
    return found


def low_rank(model: nn.Module, seed: int) -> Gradients:
    parts = [outer(model, 100 * seed + n, lambda v: v) for n in range(4)]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def only(name: str, gradients: Gradients) -> Gradients:
    return {other: gradient * (1.0 if other == name else 1e-6) for other, gradient in gradients.items()}


def column(model: nn.Module, seed: int) -> Gradients:
    found = only("layers.1.1.weight", normals(model, seed))
    hot = torch.zeros(512, 128)
    hot[:, 5] = found["layers.1.1.weight"][:, 5]
    found["layers.1.1.weight"] = hot
    return found


KINDS: dict[str, Callable[[nn.Module, int], Gradients]] = {
    "dense": normals,
    "rank one": lambda model, seed: outer(model, seed, lambda v: v),
    "rank one, positive activations": lambda model, seed: outer(model, seed, torch.relu),
    "rank one in one matrix": lambda model, seed: only("head.weight", outer(model, seed, torch.exp)),
    "low rank": low_rank,
    "embedding rows": of_tokens,
    "one hot column": column,
    "one small matrix": lambda model, seed: only("layers.0.1.weight", normals(model, seed)),
    "heavy tails": lambda model, seed: {n: g**5 for n, g in normals(model, seed).items()},
}


def put(model: nn.Module, gradients: Mapping[str, torch.Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def exact(x: Gradients, y: Gradients, within: Callable[[str], bool] = lambda _: True) -> float:
    names = [name for name in x if name in y and within(name)]
    inner = sum(float((x[n].double() * y[n].double()).sum()) for n in names)
    squares = [sum(float(g[n].double().square().sum()) for n in names) for g in (x, y)]
    return float(inner / (squares[0] * squares[1]) ** 0.5)


def norms_of(layers: Layers) -> dict[torch.device, torch.Tensor]:
    gradients = [
        unit.part.of(unit.parameter.grad)
        if unit.part and unit.parameter.grad is not None
        else unit.parameter.grad
        for unit in layers.units
    ]
    return {CPU: gradient_norms(gradients, CPU)}


def compare(
    model: nn.Module, x: Mapping[str, torch.Tensor], y: Mapping[str, torch.Tensor], *, norms: bool = True
) -> tuple[GradientCosine, dict[str, np.ndarray]]:
    layers = find_layers(model)
    cosine = GradientCosine(layers)
    put(model, x)
    cosine.arm(6, norms_of(layers) if norms else None)
    put(model, y)
    return cosine, Packet(cosine.compute(7, norms_of(layers) if norms else None)).arrays()


def assert_close(model: nn.Module, x: Gradients, y: Gradients, values: Values, tolerance: float) -> None:
    assert values.unavailable == {}
    assert values.scalars[SIM] == pytest.approx(exact(x, y), abs=tolerance)
    found = values.layers["health/grad_cosine"]
    assert list(found) == list(dict.fromkeys(block_of(name) for name in find_layers(model).names))
    for block, value in found.items():
        truth = exact(x, y, lambda name, block=block: block_of(name.rpartition(".")[0]) == block)
        assert value == pytest.approx(truth, abs=tolerance * 1.5)


@pytest.mark.parametrize("norms", [True, False], ids=["exact norms", "own norms"])
@pytest.mark.parametrize("rho", [-1.0, -0.4, 0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_error(model: Model, kind: str, rho: float, norms: bool) -> None:
    x, y = KINDS[kind](model, 1), KINDS[kind](model, 2)
    y = mix(rho, x, y)
    cosine, arrays = compare(model, x, y, norms=norms)
    values = cosine.decode(arrays)
    assert_close(model, x, y, values, TOLERANCE)
    if abs(rho) == 1.0:
        assert values.scalars[SIM] == pytest.approx(rho, abs=1e-5)


def test_layers_that_disagree_with_the_embedding(model: Model) -> None:
    """The embedding goes on, everything else turns round, and both count alike."""
    x = normals(model, 1)
    big = (6000 * 128) ** 0.5
    rest = sum(p.numel() for n, p in model.named_parameters() if n != "embed.weight") ** 0.5
    x["embed.weight"] *= rest / big
    y = {name: gradient * (1.0 if name == "embed.weight" else -1.0) for name, gradient in x.items()}
    cosine, arrays = compare(model, x, y)
    values = cosine.decode(arrays)
    assert abs(exact(x, y)) < 0.01
    assert values.scalars[SIM] == pytest.approx(exact(x, y), abs=1e-4)
    assert values.layers["health/grad_cosine"]["embed"] == pytest.approx(1.0, abs=1e-6)
    assert values.layers["health/grad_cosine"]["layers.0"] == pytest.approx(-1.0, abs=1e-6)


def test_a_sign_that_flips_at_every_step_is_minus_one_not_plus_one(model: Model) -> None:
    """Compared over ten steps instead of one, it would look perfectly steady."""
    x = normals(model, 1)
    cosine = GradientCosine(find_layers(model))
    for step in range(1, 31):
        put(model, {name: gradient * (-1) ** step for name, gradient in x.items()})
        if step % 10 == 9:
            cosine.arm(step)
        elif step % 10 == 0:
            values = cosine.decode(Packet(cosine.compute(step)).arrays())
            assert values.scalars[SIM] == pytest.approx(-1.0, abs=1e-6)


def test_the_inner_product_and_the_norms(model: Model) -> None:
    x, y = normals(model, 1), mix(0.9, normals(model, 1), normals(model, 2))
    y = {name: 5 * gradient for name, gradient in y.items()}
    cosine, arrays = compare(model, x, y)
    products = cosine.products(arrays)
    assert products is not None
    before, now = (sum(float(g.double().square().sum()) for g in one.values()) for one in (x, y))
    assert products.before == pytest.approx(before, rel=1e-5)
    assert products.now == pytest.approx(now, rel=1e-5)
    truth = exact(x, y) * (before * now) ** 0.5
    assert products.inner == pytest.approx(truth, abs=0.01 * (before * now) ** 0.5)


def test_only_consecutive_steps_are_compared(model: Model) -> None:
    put(model, normals(model, 1))
    cosine = GradientCosine(find_layers(model))
    assert cosine.compute(1) == {}
    cosine.arm(4)
    assert cosine.compute(6) == {}
    assert cosine.decode({}) == Values()
    assert cosine.products({}) is None


def test_every_step_can_be_compared_with_the_last_at_one_sketch_each(model: Model) -> None:
    cosine = GradientCosine(find_layers(model))
    gradients = [normals(model, 0)]
    for step in range(1, 5):
        gradients.append(mix(0.5, gradients[-1], normals(model, step)))
        put(model, gradients[-1])
        found = cosine.compute(step, keep=True)
        if step > 1:
            values = cosine.decode(Packet(found).arrays())
            assert values.scalars[SIM] == pytest.approx(exact(*gradients[-2:]), abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    model = Model(dtype)
    x = normals(model, 1)
    y = mix(0.3, x, normals(model, 2))
    cosine, arrays = compare(model, x, y)
    assert_close(model, x, y, cosine.decode(arrays), TOLERANCE)


def test_a_loss_scale_that_changes_between_the_steps(model: Model) -> None:
    x = normals(model, 1)
    y = mix(0.6, x, normals(model, 2))
    cosine = GradientCosine(find_layers(model))
    put(model, {name: 1024 * gradient for name, gradient in x.items()})
    cosine.arm(1, scale=torch.tensor(1024.0))
    put(model, {name: 256 * gradient for name, gradient in y.items()})
    arrays = Packet(cosine.compute(2, scale=torch.tensor(256.0))).arrays()
    products = cosine.products(arrays)
    assert products is not None
    assert cosine.decode(arrays).scalars[SIM] == pytest.approx(exact(x, y), abs=TOLERANCE)
    assert products.now == pytest.approx(sum(float(g.square().sum()) for g in y.values()), rel=0.03)


class TestPresence:
    """Parameters with a gradient in one of the steps only."""

    def test_they_do_not_count(self, model: Model) -> None:
        x = normals(model, 1)
        y = mix(0.5, x, normals(model, 2))
        for name in ("layers.0.0.weight", "layers.1.2.bias", "head.bias"):
            del x[name]
        for name in list(y):
            if name.startswith("layers.2") or name == "layers.1.0.bias":
                del y[name]
        cosine, arrays = compare(model, x, y)
        values = cosine.decode(arrays)
        assert values.scalars[SIM] == pytest.approx(exact(x, y), abs=TOLERANCE)
        assert "layers.2" not in values.layers["health/grad_cosine"]
        for block in ("layers.0", "layers.1", "head", "embed"):
            truth = exact(x, y, lambda name, block=block: block_of(name.rpartition(".")[0]) == block)
            assert values.layers["health/grad_cosine"][block] == pytest.approx(truth, abs=1.5 * TOLERANCE)

    def test_one_that_drowns_the_rest_makes_the_number_unavailable(self, model: Model) -> None:
        x = normals(model, 1)
        y = mix(0.5, x, normals(model, 2))
        x["head.weight"] = 1e6 * x["head.weight"]
        del y["head.weight"]
        cosine, arrays = compare(model, x, y)
        values = cosine.decode(arrays)
        assert "health/grad_cosine/head" in values.unavailable
        assert "head" not in values.layers["health/grad_cosine"]
        # What is common to both steps in the head is small, and so is its error in the whole.
        assert values.scalars.get(SIM, exact(x, y)) == pytest.approx(exact(x, y), abs=TOLERANCE)

    def test_without_exact_norms_a_changed_block_is_not_guessed(self, model: Model) -> None:
        x = normals(model, 1)
        y = {name: gradient for name, gradient in x.items() if name != "head.bias"}
        cosine, arrays = compare(model, x, y, norms=False)
        values = cosine.decode(arrays)
        assert SIM in values.unavailable
        assert values.layers["health/grad_cosine"]["layers.0"] == pytest.approx(1.0)

    def test_in_a_block_kept_exactly_they_are_left_out_exactly(self) -> None:
        small = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 5))
        x, y = normals(small, 1), normals(small, 2)
        del x["0.bias"], y["1.weight"]
        cosine, arrays = compare(small, x, y)
        values = cosine.decode(arrays)
        assert values.scalars[SIM] == pytest.approx(exact(x, y), abs=1e-6)

    def test_none_in_common(self, model: Model) -> None:
        x = normals(model, 1)
        cosine, arrays = compare(model, {"head.bias": x["head.bias"]}, {"embed.weight": x["embed.weight"]})
        values = cosine.decode(arrays)
        assert values.scalars == {} and values.layers == {}
        assert SIM in values.unavailable
        assert cosine.products(arrays) is None


def test_gradients_of_zero_have_no_direction(model: Model) -> None:
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    cosine, arrays = compare(model, zero, normals(model, 1))
    assert list(cosine.decode(arrays).unavailable) == [SIM]
    partly = normals(model, 1)
    partly["head.weight"] = torch.zeros(6000, 128)
    partly["head.bias"] = torch.zeros(6000)
    cosine, arrays = compare(model, partly, partly)
    values = cosine.decode(arrays)
    assert values.scalars[SIM] == pytest.approx(1.0)
    assert "head" not in values.layers["health/grad_cosine"]


def test_what_is_not_finite_has_no_direction(model: Model) -> None:
    x = normals(model, 1)
    y = normals(model, 2)
    y["layers.1.1.weight"][3, 3] = float("nan")
    cosine, arrays = compare(model, x, y)
    values = cosine.decode(arrays)
    assert SIM not in values.scalars and "not finite" in values.unavailable[SIM]
    assert "not finite" in values.unavailable["health/grad_cosine/layers.1"]
    assert abs(values.layers["health/grad_cosine"]["layers.0"]) < 0.05


def test_a_small_model_is_kept_exactly() -> None:
    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(4, 4, 3), nn.Bilinear(5, 6, 7))
    x, y = normals(small, 1), normals(small, 2)
    cosine, arrays = compare(small, x, y)
    assert cosine.decode(arrays).scalars[SIM] == pytest.approx(exact(x, y), abs=1e-6)


def test_fused_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 64)
            self.attention = nn.MultiheadAttention(64, 4)
            self.frozen = nn.Linear(64, 64)
            self.head = nn.Linear(64, 300, bias=False)
            self.head.weight = self.embed.weight

    tied = Tied()
    tied.frozen.requires_grad_(False)
    x = {n: g for n, g in normals(tied, 1).items() if "frozen" not in n}
    y = mix(0.4, x, normals(tied, 2))
    cosine, arrays = compare(tied, x, y)
    values = cosine.decode(arrays)
    assert values.scalars[SIM] == pytest.approx(exact(x, y), abs=TOLERANCE)
    assert "frozen" not in values.layers["health/grad_cosine"]


def test_sparse_gradients_of_an_embedding() -> None:
    embedding = nn.Sequential(nn.Embedding(5000, 64, sparse=True), nn.Embedding(40, 8, sparse=True))
    cosine = GradientCosine(find_layers(embedding))
    dense = []
    for step in (1, 2):
        embedding.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(step)
        ids = torch.cat([torch.arange(30), torch.randint(0, 5000, (70,), generator=generator)])
        loss = (embedding[0](ids) * torch.randn(100, 64, generator=generator).add(0.5)).sum()
        (loss + embedding[1](ids % 40).square().sum()).backward()
        dense.append({name: p.grad.to_dense() for name, p in embedding.named_parameters()})
        if step == 1:
            cosine.arm(step)
    values = cosine.decode(Packet(cosine.compute(2)).arrays())
    assert values.scalars[SIM] == pytest.approx(exact(*dense), abs=TOLERANCE)


def test_gradients_that_come_one_by_one_and_are_freed(model: Model) -> None:
    layers = find_layers(model)
    x = normals(model, 1)
    y = mix(0.3, x, normals(model, 2))
    cosine = GradientCosine(layers)
    put(model, {})
    for step, gradients in ((1, x), (2, y)):
        cosine.listen(step)
        for micro_batch in (0.25, 0.75):
            for i, unit in reversed(list(enumerate(layers.units))):
                whole = gradients[unit.name]
                cosine.feed(i, micro_batch * (whole if unit.part is None else unit.part.of(whole)))
        if step == 1:
            cosine.arm(step)
    values = cosine.decode(Packet(cosine.compute(2)).arrays())
    assert_close(model, x, y, values, TOLERANCE)


def test_feeding_without_listening_does_nothing(model: Model) -> None:
    cosine = GradientCosine(find_layers(model))
    before = cosine.nbytes
    cosine.feed(0, torch.ones(6000, 128))
    assert cosine.nbytes == before


def test_the_order_of_the_layers_does_not_matter(model: Model) -> None:
    x = normals(model, 1)
    y = mix(0.3, x, normals(model, 2))
    layers = find_layers(model)
    turned = Layers(layers.names[::-1], layers.units[::-1], tuple(range(len(layers.units))), ())
    found = []
    for one in (layers, turned):
        cosine = GradientCosine(one)
        put(model, x)
        cosine.arm(1)
        put(model, y)
        found.append(cosine.decode(Packet(cosine.compute(2)).arrays()).layers["health/grad_cosine"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_memory_and_the_random_generator() -> None:
    big = nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(12)).to_empty(device="cpu")
    for parameter in big.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = torch.get_rng_state()
    cosine = GradientCosine(find_layers(big))
    cosine.arm(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert cosine.nbytes < 0.025 * sum(p.nbytes for p in big.parameters())


def test_a_model_that_moved_is_planned_again() -> None:
    small = nn.Linear(200, 200)
    cosine = GradientCosine(find_layers(small))
    put(small, normals(small, 1))
    cosine.arm(1)
    cosine._devices[0].device = torch.device("meta")  # as if that had been its place until now
    assert cosine.compute(2) == {}
    cosine.arm(3)
    put(small, normals(small, 1))
    assert cosine.decode(Packet(cosine.compute(4)).arrays()).scalars[SIM] == pytest.approx(1.0)


def test_one_hot_column_of_a_matrix_as_wide_as_the_sketch() -> None:
    model = nn.Linear(16_381, 40, bias=False)
    cosine = GradientCosine(find_layers(model))
    random = torch.Generator().manual_seed(0)
    gradients = []
    for step in (1, 2):
        gradient = torch.zeros(40, 16_381)
        gradient[:, 3] = torch.randn(40, generator=random)
        gradients.append(gradient)
        model.weight.grad = gradient
        if step == 1:
            cosine.arm(step)
    found = cosine.decode(Packet(cosine.compute(2)).arrays()).scalars["health/grad_cosine_sim"]
    exact = torch.cosine_similarity(*(g.flatten().double() for g in gradients), dim=0)
    assert found == pytest.approx(float(exact), abs=0.02)


def test_a_batch_without_a_token_of_a_sparse_embedding() -> None:
    model = nn.Embedding(2000, 10, sparse=True)
    model(torch.zeros(0, dtype=torch.long)).sum().backward()
    cosine = GradientCosine(find_layers(model))
    cosine.arm(1)
    values = cosine.decode(Packet(cosine.compute(2)).arrays())
    assert not values.scalars and "other than zero" in values.unavailable["health/grad_cosine_sim"]
