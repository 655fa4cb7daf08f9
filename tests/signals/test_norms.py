"""Gradient norms against a double-precision reference, where a plain fp32 norm is wrong and elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.signals.exact import exact_norm
from torch import nn

from palingenesis.signals.norms import gradient_norms

CPU = torch.device("cpu")
TOLERANCE = 1e-5

# Around every size at which the way of summing changes, and rows that are short, long and longer still.
SHAPES = [
    (),
    (1,),
    (7, 5),
    (8191,),
    (8193,),
    (16384,),
    (16385,),
    (4096 * 5,),
    (100_001,),
    (300, 63),
    (300, 64),
    (129, 129),
    (10, 8192),
    (10, 16384),
    (3, 16383),
    (2, 16385),
    (16384, 10),
    (3, 128, 128),
    (64, 32, 3, 3),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def norm(gradient: torch.Tensor | None) -> float:
    (found,) = gradient_norms([gradient], CPU).tolist()
    return float(found)


def assert_exact(gradient: torch.Tensor, reference: torch.Tensor | None = None) -> None:
    expected = exact_norm(gradient if reference is None else reference)
    assert norm(gradient) == pytest.approx(expected, rel=TOLERANCE, abs=0.0, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_exact(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_elements_the_worst_case_of_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every addition rounds the same way, so errors add up instead of cancelling."""
    for value in np.linspace(0.01, 3.0, 25):
        assert_exact(torch.full(shape, float(value), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_elements_of_a_transposed_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Summed along a stride there is no vector of partial sums, and the error is ten times larger."""
    for value in np.linspace(0.01, 3.0, 15):
        gradient = torch.full(shape[::-1], float(value), dtype=dtype)
        assert_exact(gradient.permute(tuple(range(len(shape)))[::-1]))


def test_only_positive_elements() -> None:
    assert_exact(torch.rand(3_000_000, generator=torch.Generator().manual_seed(1)))


def test_thirty_million_equal_elements() -> None:
    assert norm(torch.full((30_000_000,), 0.1)) == pytest.approx(
        0.1 * math.sqrt(30e6), rel=TOLERANCE, abs=0.0
    )


@pytest.mark.parametrize("value", [3e-3, 1e-25, 1e-44, 3e38])
def test_one_element_that_is_not_zero_among_thirty_million(value: float) -> None:
    gradient = torch.zeros(30_000_000)
    gradient[29_999_999] = value
    assert norm(gradient) == float(gradient[-1].double())


@pytest.mark.parametrize(
    "scale", [1e-44, 1e-38, 1e-30, 1e-25, 1e-23, 3e-22, 1e-20, 1e-16, 1e16, 1e20, 1e30, 3e38]
)
@pytest.mark.parametrize("shape", [(3,), (100,), (20_000,), (200, 200)], ids=str)
def test_fp32_elements_of_any_size(shape: tuple[int, ...], scale: float) -> None:
    assert_exact(torch.full(shape, scale))
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_exact((noise * scale).float())


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-160, 1e150, 1e200])
def test_fp64_elements_of_any_size(scale: float) -> None:
    for shape in ((3,), (20_000,)):
        assert_exact(torch.full(shape, scale, dtype=torch.float64))


def test_half_elements_of_any_size() -> None:
    for dtype, scales in (
        (torch.float16, (6e-8, 1e-4, 6e4)),
        (torch.bfloat16, (1e-40, 1e-25, 1e20, 3e38)),
    ):
        for scale in scales:
            for shape in ((3,), (100_000,)):
                assert_exact(torch.full(shape, scale, dtype=dtype))


@pytest.mark.parametrize("exponents", [(-44, -30), (-30, -10), (-25, 20), (10, 38), (-44, 38)], ids=str)
def test_elements_of_mixed_sizes(exponents: tuple[int, int]) -> None:
    low, high = exponents
    random = torch.Generator().manual_seed(3)
    power = torch.rand(50_000, generator=random, dtype=torch.float64) * (high - low) + low
    assert_exact((10**power).float())


def test_zero_means_that_every_element_is_zero() -> None:
    assert norm(torch.zeros(100)) == 0.0
    assert norm(torch.full((100,), -0.0)) == 0.0
    assert norm(torch.zeros(100_000, dtype=torch.bfloat16)) == 0.0
    for dtype, least in ((torch.float32, 1.4e-45), (torch.float64, 5e-324), (torch.float16, 6e-8)):
        for size in (1, 100, 100_000):
            gradient = torch.zeros(size, dtype=dtype)
            gradient[size // 2] = least
            assert norm(gradient) == float(gradient.double().max()) > 0.0


@pytest.mark.parametrize("size", [1, 100, 100_000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_not_finite_stays_so(dtype: torch.dtype, size: int) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        gradient = torch.ones(size, dtype=dtype)
        gradient[-1] = bad
        found = norm(gradient)
        assert math.isnan(found) if math.isnan(bad) else found == math.inf
    both = torch.ones(max(size, 2), dtype=dtype)
    both[0], both[-1] = math.inf, math.nan
    assert math.isnan(norm(both))


def test_a_finite_norm_that_fp32_cannot_hold_is_finite() -> None:
    assert norm(torch.full((4, 4), 3e38)) == pytest.approx(4 * 3e38, rel=TOLERANCE, abs=0.0)
    assert norm(torch.full((1000,), 6e4, dtype=torch.float16)) == pytest.approx(
        6e4 * math.sqrt(1000), rel=1e-3
    )


def test_empty_and_none() -> None:
    gradients = [torch.zeros(0), None, torch.zeros(3, 0, 2, dtype=torch.bfloat16), torch.tensor(-2.0)]
    assert gradient_norms(gradients, CPU).tolist() == [0.0, 0.0, 0.0, 2.0]
    assert gradient_norms([None, None], CPU).tolist() == [0.0, 0.0]
    assert gradient_norms([], CPU).shape == (0,)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1),
    "sliced": lambda x: x[::2, 1::3],
    "narrow": lambda x: x.narrow(1, 3, 70),
    "flipped": lambda x: x.flip(0),
    "expanded": lambda x: x[:1].expand_as(x),
    "expanded last": lambda x: x[..., :1].expand_as(x),
    "negated view": lambda x: torch._neg_view(x),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "on the graph": lambda x: x.clone().requires_grad_() * 2,
    "unfolded": lambda x: x.reshape(-1)[:9000].unfold(0, 100, 37),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_layouts(name: str, dtype: torch.dtype) -> None:
    gradient = torch.rand(150, 170, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_exact(LAYOUTS[name](gradient))


def test_channels_last() -> None:
    gradient = torch.rand(32, 16, 9, 9, generator=torch.Generator().manual_seed(5))
    assert_exact(gradient.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("size", [3, 200])
def test_complex_views(size: int) -> None:
    gradient = torch.randn(size, size, dtype=torch.complex64, generator=torch.Generator().manual_seed(6))
    for view in (
        gradient.conj(),
        gradient.mT,
        gradient.mH,
        gradient.real,
        gradient.imag,
        gradient.conj().imag,
    ):
        assert_exact(view)


def test_sparse_gradients_are_summed_where_indices_repeat() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 5, (300,), generator=random)
    (table(tokens) * torch.randn(300, 8, generator=random)).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert not gradient.is_coalesced()
    assert_exact(gradient, gradient.to_dense())
    assert not gradient.is_coalesced()


def test_sparse_duplicates_that_cancel_are_zero() -> None:
    gradient = torch.sparse_coo_tensor([[1, 1]], [2.0, -2.0], (4,), check_invariants=True)
    assert norm(gradient) == 0.0
    assert norm(torch.sparse_coo_tensor(size=(4, 5), check_invariants=True)) == 0.0


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
def test_other_sparse_layouts() -> None:
    dense = torch.randn(40, 60, generator=torch.Generator().manual_seed(8)).relu()
    for sparse in (
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((4, 4)),
        dense.to_sparse(1),
        (dense + 1j * dense.flip(0)).to_sparse(),
    ):
        assert_exact(sparse, sparse.to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_gradients() -> None:
    random = torch.Generator().manual_seed(9)
    parts = [torch.randn(3, 4, generator=random), torch.randn(5, 4, generator=random)]
    flat = torch.cat(parts)
    assert_exact(torch.nested.nested_tensor(parts, layout=torch.jagged), flat)
    assert_exact(torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2), flat)
    assert_exact(torch.nested.nested_tensor(parts, layout=torch.strided), flat)


def test_a_nested_gradient_with_holes() -> None:
    """Elements that lie between the sequences are not part of it."""
    padded = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(10))
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 2])
    gradient = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert_exact(gradient, torch.cat([padded[0, 0:3], padded[1, 1:3]]))


def test_many_gradients_of_all_kinds_keep_their_places() -> None:
    random = torch.Generator().manual_seed(11)
    gradients: list[torch.Tensor | None] = []
    for i in range(400):
        dtype = DTYPES[i % len(DTYPES)]
        size = (3, 50, 9000, 20_000)[i % 4]
        gradients.append(
            None if i % 7 == 3 else torch.randn(size, generator=random, dtype=dtype) * 10 ** (i % 5)
        )
    found = gradient_norms(gradients, CPU).tolist()
    assert found == pytest.approx([exact_norm(gradient) for gradient in gradients], rel=TOLERANCE, abs=0.0)


def test_nothing_is_written_to_the_gradients() -> None:
    gradients = [torch.full((3,), 1e-30), torch.full((20_000,), 3e38), torch.randn(200, 200).mT]
    before = [(gradient.clone(), gradient._version, gradient.stride()) for gradient in gradients]
    gradient_norms(gradients, CPU)
    for gradient, (values, version, stride) in zip(gradients, before, strict=True):
        assert torch.equal(gradient, values)
        assert (gradient._version, gradient.stride()) == (version, stride)


def test_a_default_device_of_the_user_does_not_catch_the_helpers() -> None:
    gradients = [torch.ones(30_000), None, torch.full((3,), 1e-30)]
    torch.set_default_device("meta")
    try:
        found = gradient_norms(gradients, CPU)
    finally:
        torch.set_default_device(None)
    assert found.tolist() == pytest.approx(
        [math.sqrt(30_000), 0.0, math.sqrt(3) * 1e-30], rel=TOLERANCE, abs=0.0
    )


def test_deterministic_algorithms_can_be_demanded() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_exact(torch.rand(100_000))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scale", [1e-44, 1e-25, 1.0, 1e20, 3e38])
def test_on_cuda(scale: float) -> None:
    random = torch.Generator().manual_seed(12)
    hosts = [(torch.rand(size, generator=random).double() * scale).float() for size in (3, 9000, 3_000_000)]
    hosts += [host.bfloat16() for host in hosts]
    gradients = [host.cuda() for host in hosts]
    found = gradient_norms([*gradients, None, torch.zeros(0, device="cuda")], gradients[0].device)
    assert found.device.type == "cuda"
    expected = [*(exact_norm(host) for host in hosts), 0.0, 0.0]
    assert found.tolist() == pytest.approx(expected, rel=TOLERANCE, abs=0.0)


# -- whatever comes ---------------------------------------------------------------------------------------


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any shape, dtype, size of elements and strides."""
    dims = draw(st.integers(0, 4))
    most = {0: 1, 1: 40_000, 2: 220, 3: 36, 4: 14}[dims]
    shape = [draw(st.integers(0, most)) for _ in range(dims)]
    dtype = draw(st.sampled_from(DTYPES))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    base = torch.randn(shape, generator=random, dtype=torch.float64)
    base = torch.where(torch.rand(shape, generator=random) < draw(st.sampled_from([0.0, 0.9])), 0.0, base)
    low, high = draw(st.sampled_from([(0, 0), (-3, 3), (-40, -30), (20, 30), (-30, 30), (-12, -8)]))
    power = torch.rand(shape, generator=random, dtype=torch.float64) * (high - low) + low
    gradient = (base * 10**power).to(real).to(dtype)
    if draw(st.integers(0, 9)) == 0 and gradient.numel():
        gradient.view(-1)[draw(st.integers(0, gradient.numel() - 1))] = draw(
            st.sampled_from([math.nan, math.inf])
        )
    for _ in range(draw(st.integers(0, 3)) if dims else 0):
        how = draw(st.sampled_from(["transpose", "slice", "flip", "expand", "conj"]))
        axis = draw(st.integers(0, dims - 1))
        if how == "transpose":
            gradient = gradient.transpose(axis, draw(st.integers(0, dims - 1)))
        elif how == "slice":
            gradient = gradient[(slice(None),) * axis + (slice(draw(st.integers(0, 2)), None, 2),)]
        elif how == "flip":
            gradient = gradient.flip(axis)
        elif how == "expand" and gradient.shape[axis]:
            gradient = gradient.narrow(axis, 0, 1).expand(gradient.shape)
        elif how == "conj":
            gradient = gradient.conj()
    return gradient


@settings(max_examples=250, deadline=None, derandomize=True)
@given(gradients())
def test_any_gradient(gradient: torch.Tensor) -> None:
    assert_exact(gradient)
