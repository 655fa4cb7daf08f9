"""L2 norms of many gradients at once, exact where a plain fp32 norm is not.

``torch.linalg.vector_norm`` on the CPU accumulates in fp32 over the whole tensor: on 30 million elements it
is off by up to 2%, elements below 1e-23 square to zero and elements above 1e19 to infinity. So large tensors
are reduced in rows whose squared norms are then added in fp64, and the few results that could have
underflowed or overflowed are computed again with scaling. On CUDA the accumulation itself is fp64, which a
reduction bound by memory does not notice; nothing there may be read on the host to decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The most elements that are summed in one go: of equal values, as many as this are off by 8e-6 already.
# Larger tensors are reduced in rows of ROW. What is not contiguous is reduced in its own rows, unless they
# are shorter than SHORT: those would cost more calls than a copy.
WHOLE = 1 << 13
ROW = 1 << 12
SHORT = 1 << 6

# Below this norm the squares of fp32 elements may have been subnormal or zero.
TINY = 1e-14

# Elements converted in one go, half precision to fp32 or anything to fp64: bounds the memory of the copy.
PIECE = 1 << 20

_HALF = frozenset({torch.float16, torch.bfloat16})


def gradient_norms(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """The L2 norm of each gradient; 0 where it is ``None``.

    Args:
        gradients: on one device; dense, sparse, half, complex or nested, of any shape.
        device: that device.

    Returns:
        ``[len(gradients)]`` on the device, fp64 (fp32 on devices without it). 0 means that every element is
        exactly zero. Relative error at most 1e-5 against fp64.
    """
    plain = [None if gradient is None else plain_values(gradient) for gradient in gradients]
    if device.type == "cpu":
        return _on_host(plain)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    zero = torch.zeros((), dtype=dtype, device=device)
    present = [tensor for tensor in plain if tensor is not None]
    norms = iter(torch._foreach_norm(present, 2, dtype=dtype) if present else ())
    return torch.stack([zero if tensor is None else next(norms) for tensor in plain])


def plain_values(gradient: torch.Tensor) -> torch.Tensor:
    """A real, strided tensor with a gradient's elements: the stored ones if it is sparse or nested."""
    if gradient.layout is not torch.strided:
        if gradient.layout == torch.sparse_coo:
            gradient = gradient.coalesce()
        gradient = _without_holes(gradient) if _has_holes(gradient) else gradient.values()
    elif gradient.is_nested:
        gradient = gradient.values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _has_holes(gradient: torch.Tensor) -> bool:
    """Whether a nested tensor's buffer holds elements between its sequences, as after ``nested.narrow``."""
    return gradient.layout == torch.jagged and gradient.lengths() is not None  # type: ignore[attr-defined]


def _without_holes(gradient: torch.Tensor) -> torch.Tensor:
    return torch.cat([sequence.flatten() for sequence in gradient.unbind()])


def _on_host(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    large: list[int] = []
    rows: list[torch.Tensor] = []
    counts: list[int] = []
    small: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        elements = gradient.numel()
        if elements > WHOLE:
            norms_of_rows = _row_norms(gradient, elements)
            large.append(i)
            rows.append(norms_of_rows)
            counts.append(norms_of_rows.numel())
        elif elements:
            small.setdefault(gradient.dtype, {})[i] = gradient
    # The device is named wherever a tensor is made: a default device set by the user must not catch it.
    norms = torch.zeros(len(gradients), dtype=torch.float64, device="cpu")
    if rows:
        squares = torch.cat(rows).double().square_()
        lengths = torch.tensor(counts, device="cpu")
        norms[large] = torch.segment_reduce(squares, "sum", lengths=lengths).sqrt_()
    for dtype, members in small.items():
        wanted = torch.float32 if dtype in _HALF else None
        wholes = torch._foreach_norm(list(members.values()), 2, dtype=wanted)
        norms[list(members)] = torch.stack(wholes).double()
    in_doubt = ~torch.isfinite(norms) | (norms < TINY)
    for i in in_doubt.nonzero().flatten().tolist():
        gradient = gradients[i]
        if gradient is not None and gradient.numel():
            norms[i] = _scaled_norm(gradient)
    return norms


def _row_norms(gradient: torch.Tensor, elements: int) -> torch.Tensor:
    """Norms of rows of moderate length, without a copy of the elements where that can be avoided."""
    if elements % ROW == 0 and gradient.dtype not in _HALF and gradient.is_contiguous():
        rows: torch.Tensor = torch.linalg.vector_norm(gradient.view(-1, ROW), dim=-1)  # nearly every weight
        return rows
    if not gradient.is_contiguous():
        # In the order of memory: along a stride, elements are added one by one and rounding grows tenfold.
        gradient = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    if gradient.dtype in _HALF:
        # Rows of half precision have no fast kernel.
        return torch.cat([_of_rows(piece.float()) for piece in gradient.reshape(-1).split(PIECE)])
    if not gradient.is_contiguous() and gradient.stride(-1) == 1 and SHORT <= gradient.shape[-1] <= WHOLE:
        own_rows: torch.Tensor = torch.linalg.vector_norm(gradient, dim=-1)
        return own_rows.flatten()
    return _of_rows(gradient.reshape(-1))


def _of_rows(flat: torch.Tensor) -> torch.Tensor:
    even, rest = divmod(flat.numel(), ROW)
    norms: torch.Tensor = torch.linalg.vector_norm(flat[: even * ROW].view(even, ROW), dim=-1)
    if rest:
        norms = torch.cat([norms, torch.linalg.vector_norm(flat[even * ROW :]).unsqueeze(0)])
    return norms


def _scaled_norm(gradient: torch.Tensor) -> float:
    """The norm in fp64, scaled by the largest element so that no square leaves the range."""
    pieces = gradient.reshape(-1).split(PIECE)
    bounds = [torch.aminmax(piece) for piece in pieces]
    largest = max(max(abs(float(low)), abs(float(high))) for low, high in bounds)
    if any(math.isnan(float(low)) for low, _ in bounds):
        return math.nan
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(sum(float((piece.double() / largest).square().sum()) for piece in pieces))
