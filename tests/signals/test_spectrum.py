"""Stable ranks against singular value decompositions in double precision."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals import krylov, spectrum, vectors
from palingenesis.signals.krylov import leading
from palingenesis.signals.packet import Packet
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.values import Values
from palingenesis.signals.weights import WeightNorms

TOLERANCE = 0.01
NAME = "health/stable_rank"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(m: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, n, generator=generator(seed))


def with_singular_values(values: torch.Tensor, m: int, n: int) -> torch.Tensor:
    u = torch.linalg.qr(gaussian(m, len(values), 1).double()).Q
    v = torch.linalg.qr(gaussian(n, len(values), 2).double()).Q
    return ((u * values.double()) @ v.T).float()


def in_a_corner(size: int, corner: slice) -> torch.Tensor:
    """Noise, and a block that has collapsed to rank one."""
    matrix = gaussian(size, size)
    ones = torch.ones(64)
    matrix[corner, corner] = 4 * torch.outer(ones, ones)
    return matrix


MATRICES: dict[str, Callable[[], torch.Tensor]] = {
    "gaussian": lambda: gaussian(300, 200),
    "gaussian, wide": lambda: gaussian(100, 700),
    "gaussian, square": lambda: gaussian(400, 400),
    "smallest": lambda: gaussian(8, 8),
    "short side of 8": lambda: gaussian(8, 1000),
    "all positive": lambda: torch.rand(200, 150, generator=generator()),
    "spiked": lambda: (
        gaussian(300, 200) + 60 * torch.outer(gaussian(300, 1)[:, 0], gaussian(200, 1)[:, 0]) / 245
    ),
    "just off the bulk": lambda: with_singular_values(
        torch.cat([torch.tensor([1.1]), torch.linspace(1, 0.1, 150)]), 200, 151
    ),
    "rank 1": lambda: torch.outer(gaussian(300, 1)[:, 0], gaussian(200, 1)[:, 0]),
    "rank 5": lambda: gaussian(300, 5) @ gaussian(5, 200, 1),
    "power law": lambda: with_singular_values(torch.arange(1, 201) ** -1.0, 300, 200),
    "slow power law": lambda: with_singular_values(torch.arange(1, 201) ** -0.2, 300, 200),
    "two equal": lambda: with_singular_values(torch.tensor([3.0, 3.0] + [1.0] * 100), 200, 120),
    "nearly equal": lambda: with_singular_values(3 - 1e-3 * torch.arange(100), 200, 120),
    "orthogonal": lambda: torch.linalg.qr(gaussian(256, 256)).Q,
    "identity": lambda: torch.eye(200, 300),
    "one element": lambda: torch.zeros(64, 64).index_put_(
        (torch.tensor(3), torch.tensor(5)), torch.tensor(2.0)
    ),
    "collapsed in the first corner": lambda: in_a_corner(640, slice(0, 64)),
    "collapsed outside of it": lambda: in_a_corner(640, slice(576, 640)),
    "tiny elements": lambda: gaussian(100, 80) * 1e-30,
    "huge elements": lambda: gaussian(100, 80) * 1e30,
}


def exact(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix.detach().double())
    return float(values.square().sum() / values[0].square())


def model_of(*weights: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for i, weight in enumerate(weights):
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = nn.Parameter(weight)
        model.add_module(f"fc{i}", linear)
    return model


def read(found: Spectrum) -> Values:
    return found.decode(Packet(found.compute()).arrays())


def of(model: nn.Module) -> Values:
    return read(Spectrum(find_layers(model), model))


@pytest.mark.parametrize("name", MATRICES)
def test_cold_against_svd(name: str) -> None:
    weight = MATRICES[name]()
    values = of(model_of(weight))
    assert values.layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)
    assert values.unavailable == {}


@pytest.mark.parametrize("name", MATRICES)
def test_cold_without_reading_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a fixed number of steps, eigenvectors by squaring; what is not settled is withheld."""
    monkeypatch.setattr(krylov, "leading", krylov._by_squaring)
    monkeypatch.setattr(spectrum, "WARM", spectrum.COLD)
    monkeypatch.setattr(spectrum, "MOST", spectrum.COLD)
    weight = MATRICES[name]()
    values = of(model_of(weight))
    assert values.layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 4, 32])
def test_eigenvectors_by_squaring_agree_with_eigh(size: int) -> None:
    root = gaussian(size, size).double()
    matrix = torch.stack([root @ root.T, torch.zeros(size, size), 1e-100 * root @ root.T])
    value, vector = krylov._by_squaring(matrix)
    expected, _ = leading(matrix)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=0)
    for i in (0, 2):
        torch.testing.assert_close(vector[i] @ matrix[i] @ vector[i], expected[i], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gaussian", "rank 1", "power law", "two equal"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    weight = MATRICES[name]().to(dtype)
    assert of(model_of(weight)).layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)


def test_half_precision_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PIECE", 1000)
    for weight in (gaussian(100, 333).bfloat16(), gaussian(333, 100).bfloat16()):
        assert of(model_of(weight)).layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)


def test_many_matrices_of_many_shapes_at_once() -> None:
    weights = [gaussian(100 + i % 3, 60, i) for i in range(40)] + [MATRICES["power law"](), torch.eye(60)]
    values = of(model_of(*weights)).layers[NAME]
    for i, weight in enumerate(weights):
        assert values[f"fc{i}"] == pytest.approx(exact(weight), rel=TOLERANCE)


def test_zero_and_too_small_matrices_have_no_rank() -> None:
    values = of(model_of(torch.zeros(32, 32), gaussian(1, 64), gaussian(7, 64), gaussian(32, 32)))
    assert list(values.layers[NAME]) == ["fc3"]
    assert values.unavailable == {f"{NAME}/fc0": "every element is zero"}
    assert values.scalars[f"{NAME}_min"] == values.scalars[f"{NAME}_mean"] == values.layers[NAME]["fc3"]


def test_non_finite_weights_are_told_as_they_are_and_forgotten() -> None:
    weight, other = gaussian(200, 200), gaussian(200, 200, 5)
    model = model_of(weight.clone(), other)
    found = Spectrum(find_layers(model), model)
    read(found)
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            model.fc0.weight[3, 4] = bad
        values = read(found)
        assert math.isnan(values.layers[NAME]["fc0"]) and math.isnan(values.scalars[f"{NAME}_min"])
        assert values.layers[NAME]["fc1"] == pytest.approx(exact(other), rel=TOLERANCE)
    with torch.no_grad():
        model.fc0.weight.copy_(weight)
    assert read(found).layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)


# -- warm starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian, square", "power law", "nearly equal", "spiked", "rank 5"])
@pytest.mark.parametrize("change", [0.0, 0.01, 0.1])
def test_warm_against_svd(name: str, change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MATRICES[name]())
    found = Spectrum(find_layers(model), model)
    read(found)
    weight = model.fc0.weight.detach()
    for call in range(6):
        noise = torch.randn(weight.shape, generator=generator(call))
        weight += change * noise * weight.norm() / noise.norm()
        assert read(found).layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE)


def test_warm_calls_make_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(gaussian(400, 400))
    found = Spectrum(find_layers(model), model)
    calls: list[int] = []
    gram = spectrum.gram
    monkeypatch.setattr(spectrum, "gram", lambda *terms: (calls.append(1), gram(*terms))[1])
    read(found)
    cold = len(calls)
    read(found)
    assert cold > 10 > len(calls) - cold


def test_weights_replaced_between_two_calls() -> None:
    """The old vectors say nothing about the new weights."""
    model = model_of(gaussian(300, 300))
    found = Spectrum(find_layers(model), model)
    for i, name in enumerate(("rank 1", "gaussian, square", "power law", "orthogonal")):
        read(found)
        new = MATRICES[name]()[:300, :300]
        weight = torch.zeros(300, 300)
        weight[: new.shape[0], : new.shape[1]] = new
        with torch.no_grad():
            model.fc0.weight.copy_(weight)
        assert read(found).layers[NAME]["fc0"] == pytest.approx(exact(weight), rel=TOLERANCE), i


@pytest.mark.parametrize("spike", [3.0, 10.0, 100.0])
def test_a_direction_that_comes_up_between_two_calls(spike: float) -> None:
    """It is orthogonal to everything remembered, and is seen at once."""
    weight = gaussian(400, 400)
    model = model_of(weight.clone())
    found = Spectrum(find_layers(model), model)
    for _ in range(3):
        read(found)
    u, s, v = torch.linalg.svd(weight)
    with torch.no_grad():
        model.fc0.weight += (spike - 1) * s[0] * torch.outer(u[:, 200], v[200])
    assert read(found).layers[NAME]["fc0"] == pytest.approx(exact(model.fc0.weight), rel=TOLERANCE)


@pytest.mark.parametrize("lead", [1.1, 1.3])
def test_a_direction_that_barely_takes_the_lead_is_found_within_eight_calls(lead: float) -> None:
    weight = gaussian(400, 400)
    model = model_of(weight.clone())
    found = Spectrum(find_layers(model), model)
    read(found)
    u, s, v = torch.linalg.svd(weight)
    with torch.no_grad():
        model.fc0.weight += (lead * s[0] - s[200]) * torch.outer(u[:, 200], v[200])
    ranks = [read(found).layers[NAME]["fc0"] for _ in range(spectrum.SEARCH_EVERY)]
    assert ranks[-1] == pytest.approx(exact(model.fc0.weight), rel=TOLERANCE)


def test_a_direction_that_grows_slowly_into_the_lead() -> None:
    """By 1% of the leading one a call: what is overlooked for some calls stays small."""
    weight = gaussian(300, 300)
    model = model_of(weight.clone())
    found = Spectrum(find_layers(model), model)
    u, s, v = torch.linalg.svd(weight)
    errors = []
    for call in range(70):
        size = (0.8 + 0.01 * call) * s[0]
        with torch.no_grad():
            model.fc0.weight.copy_(weight + (size - s[150]) * torch.outer(u[:, 150], v[150]))
        errors.append(read(found).layers[NAME]["fc0"] / exact(model.fc0.weight) - 1)
    assert max(errors) < 0.2 and errors[-1] < TOLERANCE
    assert sum(abs(error) > TOLERANCE for error in errors) <= spectrum.SEARCH_EVERY


def test_matrices_that_are_settled_do_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices with equally many columns begin together; each takes as many products as it needs itself."""
    easy, hard = MATRICES["spiked"](), MATRICES["gaussian, square"]()
    size = min(easy.shape[1], hard.shape[1])
    model = model_of(easy[:, :size].contiguous(), hard[:, :size].contiguous())
    products = {model.fc0.weight.data_ptr(): 0, model.fc1.weight.data_ptr(): 0}
    gram = spectrum.gram

    def counted(matrix: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        products[matrix.data_ptr()] += 1
        return gram(matrix, *others)

    monkeypatch.setattr(spectrum, "gram", counted)
    ranks = of(model).layers[NAME]
    for layer, weight in (("fc0", model.fc0.weight), ("fc1", model.fc1.weight)):
        assert ranks[layer] == pytest.approx(exact(weight), rel=TOLERANCE)
    few, many = products.values()
    assert few < many


def test_norms_that_are_known_already_are_used() -> None:
    model = model_of(gaussian(200, 100), MATRICES["power law"]())
    layers = find_layers(model)
    weights, found = WeightNorms(layers), Spectrum(layers, model)
    weights.compute()
    values = found.decode(Packet(found.compute(weights.norms)).arrays())
    assert values.layers == of(model).layers


# -- what is a matrix ------------------------------------------------------------------------------------


def test_convolutions_are_flattened() -> None:
    model = nn.Module()
    model.two = nn.Conv2d(12, 16, 3)
    model.one = nn.Conv1d(12, 16, 9)
    values = of(model).layers[NAME]
    assert values["two"] == pytest.approx(exact(model.two.weight.reshape(16, -1)), rel=TOLERANCE)
    assert values["one"] == pytest.approx(exact(model.one.weight.reshape(16, -1)), rel=TOLERANCE)


def test_a_layer_of_experts_has_the_smallest_rank_of_them() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    stack = torch.randn(6, 40, 200, generator=generator())
    stack[4] = MATRICES["rank 5"]()[:40, :200]
    model.experts.up_proj = nn.Parameter(stack)
    layers = find_layers(model)
    found = Spectrum(layers, model)
    expected = min(exact(expert) for expert in stack)
    for _ in range(3):
        (value,) = read(found).layers[NAME].values()
        assert value == pytest.approx(expected, rel=TOLERANCE) and value < 6


def test_a_collapsed_query_shows_inside_of_a_fused_projection() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=4, n_embd=32, vocab_size=64, n_positions=16))
    weight = gpt.transformer.h[0].attn.c_attn.weight.detach()
    weight[:, 32:64] = torch.outer(torch.ones(32), torch.ones(32))
    values = of(gpt)
    ranks = values.layers[NAME]
    assert ranks["transformer.h.0.attn.c_attn[k]"] == pytest.approx(1.0, rel=TOLERANCE)
    assert ranks["transformer.h.0.attn.c_attn[q]"] == pytest.approx(exact(weight[:, :32]), rel=TOLERANCE)
    assert values.scalars[f"{NAME}_min"] == pytest.approx(1.0, rel=TOLERANCE)

    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            num_hidden_layers=1, num_attention_heads=4, hidden_size=32, intermediate_size=64, vocab_size=64
        )
    )
    weight = neox.gpt_neox.layers[0].attention.query_key_value.weight.detach()
    name = "gpt_neox.layers.0.attention.query_key_value"
    per_head = weight.view(4, 3, 8, 32)
    for i, part in enumerate("qkv"):
        expected = exact(per_head[:, i].reshape(32, 32))
        assert of(neox).layers[NAME][f"{name}[{part}]"] == pytest.approx(expected, rel=TOLERANCE)


def test_embeddings_and_heads_have_a_value_but_no_part_in_the_smallest() -> None:
    model = nn.Module()
    model.tokens = nn.Embedding(50, 16)  # known by its kind, not its name
    model.layers = nn.ModuleList([nn.Linear(16, 16)])
    model.lm_head = nn.Linear(16, 50)
    with torch.no_grad():
        model.tokens.weight.fill_(1.0)
        model.lm_head.weight.fill_(1.0)
    values = of(model)
    assert values.layers[NAME]["tokens"] == pytest.approx(1.0, rel=TOLERANCE)
    assert values.layers[NAME]["lm_head"] == pytest.approx(1.0, rel=TOLERANCE)
    assert values.scalars[f"{NAME}_min"] == values.layers[NAME]["layers.0"] > 2


# -- no harm ---------------------------------------------------------------------------------------------


def test_neither_weights_nor_random_numbers_are_touched() -> None:
    model = model_of(gaussian(200, 100))
    before, state = model.fc0.weight.clone(), torch.get_rng_state()
    found = Spectrum(find_layers(model), model)
    for _ in range(2):
        read(found)
    assert torch.equal(before, model.fc0.weight) and torch.equal(state, torch.get_rng_state())


def test_under_autocast_the_products_keep_their_precision() -> None:
    weight = gaussian(300, 200)
    model = model_of(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = of(model)
    assert inside.layers == of(model).layers


def test_what_is_held_is_a_small_part_of_the_model() -> None:
    model = model_of(*(gaussian(512, 512, i) for i in range(4)))
    found = Spectrum(find_layers(model), model)
    read(found)
    assert 0 < found.nbytes <= 0.002 * sum(parameter.nbytes for parameter in model.parameters())


# -- two processes ---------------------------------------------------------------------------------------

PROGRAM = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from palingenesis.layers import find_layers
from palingenesis.signals.drift import Drift
from palingenesis.signals.meeting import agree
from palingenesis.signals.packet import Packet
from palingenesis.signals.sharding import meeting_device, sum_over_ranks
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.updates import Updates
from palingenesis.signals.weights import WeightNorms

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(60, 201, bias=False), nn.Linear(201, 60)
        self.conv = nn.Conv2d(9, 17, 3)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.columns = nn.Linear(300, 70)
        experts = torch.randn(5, 20, 30) * torch.arange(1, 6)[:, None, None]
        experts[4] += 20
        self.experts = nn.Parameter(experts)
        self.replicated = nn.Linear(40, 50)

def families(model, layers, together):
    drift, norms, ranks = Drift(layers), WeightNorms(layers), Spectrum(layers, model)
    drift.begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(3):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            whole = torch.randn(parameter.shape)
            whole[::3] = 0
            if hasattr(parameter, "placements"):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        updates = Updates(layers, [optimizer])
        updates.arm(seed)
        optimizer.step()
        tensors = {**updates.compute(seed + 1), **drift.compute(), **norms.compute()}
        tensors |= ranks.compute(norms.norms)
        if together:
            tensors = sum_over_ranks(tensors, meeting_device(layers))
        arrays = Packet(tensors).arrays()
        rows = {}
        for family in (updates, drift, norms, ranks):
            values = family.decode(arrays)
            assert not values.unavailable, values.unavailable
            rows |= values.flat()
    return rows

torch.manual_seed(0)
whole = Model()
sharded = Model()
sharded.load_state_dict(whole.state_dict())
expected = families(whole, find_layers(whole), False)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for block in sharded.blocks:
    fully_shard(block, mesh=mesh)
columns = distribute_tensor(sharded.columns.weight.detach(), mesh, [Shard(1)])
sharded.columns.weight = nn.Parameter(columns)
sharded.experts = nn.Parameter(distribute_tensor(sharded.experts.detach(), mesh, [Shard(0)]))
layers = agree(find_layers(sharded))
assert layers.together
found = families(sharded, layers, True)
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
for name, value in expected.items():
    # Ranks and norms are the same; what is sketched or sampled is drawn anew for every shard.
    rough = "drift" in name or "update_ratio" in name
    allowed = 0.01 * abs(value) if "stable_rank" in name else 0.1 * abs(value) if rough else 1e-4 * abs(value)
    if "lost" not in name:
        assert abs(found[name] - value) <= allowed, (name, found[name], value)
assert abs(found["health/update_lost_pct"] - expected["health/update_lost_pct"]) < 0.5
dist.barrier()
dist.destroy_process_group()
# All was right by here; what the threads of gloo do at the end of an interpreter is not the test's.
os._exit(0)
"""


def test_shards_on_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
