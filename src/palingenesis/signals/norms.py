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

# Tensors up to this size are reduced as a whole, larger ones in rows of at most as many elements. Rows
# shorter than SHORT would cost more calls than they save.
WHOLE = 1 << 14
ROW = 1 << 12
SHORT = 1 << 6

# Half-precision rows have no fast kernel; there the chunks are larger, and fewer.
HALF_CHUNK = 1 << 15

# Below this norm the squares of fp32 elements may have been subnormal or zero.
TINY = 1e-14

# Elements looked at in one go where a norm is computed again in fp64: bounds the memory of the copy.
PIECE = 1 << 20

_HALF = (torch.float16, torch.bfloat16)


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
        gradient = gradient.values()
    elif gradient.is_nested:
        gradient = gradient.values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _on_host(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    pieces: list[torch.Tensor] = []
    owners: list[int] = []
    counts: list[int] = []
    whole: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is None or gradient.numel() == 0:
            continue
        if gradient.numel() > WHOLE and gradient.dtype not in _HALF:
            for rows in _rows(gradient):
                piece = torch.linalg.vector_norm(rows, dim=-1).flatten()
                pieces.append(piece)
                owners.append(i)
                counts.append(piece.numel())
        else:
            tensors, whose = whole.setdefault(gradient.dtype, ([], []))
            chunks = [gradient] if gradient.numel() <= WHOLE else gradient.reshape(-1).split(HALF_CHUNK)
            tensors.extend(chunks)
            whose.extend([i] * len(chunks))
    for dtype, (tensors, whose) in whole.items():
        pieces.append(
            torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32 if dtype in _HALF else None))
        )
        owners.extend(whose)
        counts.extend([1] * len(whose))
    norms = torch.zeros(len(gradients), dtype=torch.float64)
    if pieces:
        index = torch.repeat_interleave(torch.tensor(owners), torch.tensor(counts))
        norms.index_add_(0, index, torch.cat([piece.double() for piece in pieces]).square_()).sqrt_()
    doubtful = ~torch.isfinite(norms) | (norms < TINY)
    for i in doubtful.nonzero().flatten().tolist():
        gradient = gradients[i]
        if gradient is not None and gradient.numel():
            norms[i] = _scaled_norm(gradient)
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


def _rows(gradient: torch.Tensor) -> list[torch.Tensor]:
    """The elements as matrices of moderate rows, without a copy where the strides allow it."""
    if gradient.dim() > 1 and SHORT <= gradient.shape[-1] <= WHOLE:
        return [gradient]
    flat = gradient.reshape(-1)
    even = flat.numel() // ROW * ROW
    rows = [flat[:even].view(-1, ROW)]
    if even < flat.numel():
        rows.append(flat[even:].unsqueeze(0))
    return rows
