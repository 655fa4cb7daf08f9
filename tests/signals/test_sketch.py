"""Sketches: unbiased, as exact as they claim for every kind of tensor, and the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from palingenesis.signals.sketch import Sketcher, hashed, prime_up_to

CPU = torch.device("cpu")
WIDTH = 1021
ROWS, COLUMNS = 640, 512


def sketch(label: str, values: torch.Tensor, width: int = WIDTH, weight: float = 1.0) -> torch.Tensor:
    elements = values.numel() * (2 if values.is_complex() else 1)
    sketcher = Sketcher({label: elements}, width, CPU, {label: weight})
    found = torch.zeros(width)
    sketcher.add(label, values, found, sketcher.scratch())
    return found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def hot_column() -> torch.Tensor:
    """All energy in one input feature, as with massive activations."""
    found = torch.zeros(ROWS, COLUMNS)
    found[:, 3] = normal(ROWS)
    return found


def touched_rows() -> torch.Tensor:
    found = torch.zeros(ROWS, COLUMNS)
    found[::40] = normal(ROWS // 40, COLUMNS)
    return found


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: normal(ROWS, COLUMNS),
    "rank one": lambda: torch.outer(normal(ROWS), normal(COLUMNS, seed=1)),
    "rank one of positive activations": lambda: torch.outer(normal(ROWS), normal(COLUMNS, seed=1).relu()),
    "constant": lambda: torch.ones(ROWS, COLUMNS),
    "alternating": lambda: torch.tensor([1.0, -1.0]).repeat(ROWS * COLUMNS // 2).view(ROWS, COLUMNS),
    "low rank": lambda: normal(ROWS, 4) @ normal(4, COLUMNS, seed=1),
    "one hot column": hot_column,
    "touched rows": touched_rows,
    "heavy tails": lambda: normal(ROWS, COLUMNS) ** 5,
}


@pytest.mark.parametrize("kind", KINDS)
def test_squared_norms_are_unbiased_with_the_stated_variance(kind: str) -> None:
    """Variance 2/C for every kind: not for the dense ones alone."""
    values = KINDS[kind]()
    truth = float(values.double().square().sum())
    found = np.array([float(sketch(f"layer {n}", values).double().square().sum()) / truth for n in range(48)])
    expected = (2 / WIDTH) ** 0.5
    assert abs(found.mean() - 1) < 4 * expected / len(found) ** 0.5
    assert found.std() < 1.5 * expected


def test_inner_products_of_different_tensors_are_unbiased() -> None:
    x = normal(ROWS, COLUMNS)
    y = 0.3 * x + normal(ROWS, COLUMNS, seed=1)
    truth = float((x.double() * y).sum())
    scale = float(x.norm() * y.norm())
    found = [float(sketch(f"{n}", x).double() @ sketch(f"{n}", y).double()) for n in range(48)]
    assert abs(np.mean(found) - truth) / scale < 4 * (1.1 / WIDTH / 48) ** 0.5


def test_errors_of_two_constant_tensors_do_not_add_up() -> None:
    """Signs of different labels are independent: the sketch of many tensors is not worse than that of one."""
    ones = torch.ones(100 * WIDTH + 7)
    errors = [float(sketch(f"layer {n}", ones).double().square().sum()) / ones.numel() - 1 for n in range(80)]
    first, second = np.array(errors).reshape(2, 40)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
    assert abs(np.mean(errors)) < 4 * (2 / WIDTH / 80) ** 0.5


@pytest.mark.parametrize("size", [1, 5, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH, 300 * WIDTH + 11])
def test_it_is_linear_and_a_matrix_of_signs(size: int) -> None:
    x, y = normal(size), normal(size, seed=1)
    expected = 2 * sketch("w", x) - sketch("w", y)
    assert torch.allclose(sketch("w", 2 * x - y), expected, atol=1e-4 * size**0.5)
    for at in {0, size // 2, size - 1}:
        one = torch.zeros(size)
        one[at] = 1.0
        found = sketch("w", one)
        assert found.abs().sum() == 1.0 and found.abs().max() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_other_dtypes_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    values = torch.randn(300, 97, dtype=dtype, generator=generator(0))
    exact = torch.view_as_real(values).float() if dtype.is_complex else values.float()
    found = sketch("w", values)
    assert found.dtype is torch.float32
    assert torch.allclose(found, sketch("w", exact), atol=1e-4)


def test_strides_do_not_matter() -> None:
    values = normal(300, 97)
    assert torch.equal(sketch("w", values.t().contiguous().t()), sketch("w", values))
    image = normal(8, 16, 9, 9)
    assert torch.equal(sketch("w", image.to(memory_format=torch.channels_last)), sketch("w", image))


@pytest.mark.parametrize("shape", [(700, 64), (5, 8), (4096, 129)], ids=str)
@pytest.mark.parametrize("sparse_dims", [1, 2])
def test_sparse_tensors_are_sketched_as_their_dense_ones(shape: tuple[int, int], sparse_dims: int) -> None:
    dense = normal(*shape) * (torch.arange(shape[0]) % 5 == 2).unsqueeze(1)
    twice = (dense / 2).to_sparse(sparse_dims)
    indices, values = torch.cat([twice.indices()] * 2, 1), torch.cat([twice.values()] * 2)
    uncoalesced = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    assert torch.allclose(sketch("w", uncoalesced), sketch("w", dense), atol=1e-5)


def test_a_weight_counts_in_the_inner_product() -> None:
    values = normal(50_000)
    assert torch.allclose(sketch("w", values, weight=0.25), 0.5 * sketch("w", values), atol=1e-4)


def test_signs_depend_on_the_label_alone() -> None:
    sizes = {"first": 50_000, "second": 20_000, "third": 700}
    values = {label: normal(size) for label, size in sizes.items()}
    one = Sketcher(sizes, WIDTH, CPU)
    other = Sketcher(dict(reversed(sizes.items())) | {"fourth": 999}, WIDTH, CPU)
    for label, value in values.items():
        left, right = torch.zeros(WIDTH), torch.zeros(WIDTH)
        one.add(label, value, left, one.scratch())
        other.add(label, value, right, other.scratch())
        assert torch.equal(left, right)
    assert not torch.equal(sketch("first", values["first"]), sketch("another", values["first"]))


def test_another_process_draws_the_same_signs() -> None:
    program = (
        "from palingenesis.signals.sketch import hashed\nprint(hashed(b'model.layers.0.weight', 16).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(hashed(b"model.layers.0.weight", 16).tolist())
    # What saved sketches rest on: a change here makes them unreadable.
    assert hashed(b"model.layers.0.weight", 4).tolist() == [75, 78, 30, 222]


def test_random_generators_are_left_alone() -> None:
    before, np_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    sketch("w", torch.ones(100_000))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], np_before)


def test_what_is_not_finite_shows() -> None:
    values = normal(50_000)
    values[777] = float("nan")
    assert sketch("w", values).isnan().any()
    values[777] = float("inf")
    assert sketch("w", values).isinf().any()


def test_memory() -> None:
    sketcher = Sketcher({"w": 30_000_000}, 16_381, CPU)
    assert sketcher.nbytes < 300_000


def test_primes() -> None:
    assert [prime_up_to(n) for n in (0, 2, 3, 4, 16, 16_384, 65_536)] == [2, 2, 3, 3, 13, 16_381, 65_521]
