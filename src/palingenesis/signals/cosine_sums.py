"""From the sums that two steps' sketches gave to cosines: numbers in, numbers out, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Sums of a block over its elements, devices and ranks. The variance is that of the inner product where a
# parameter had a gradient in one step only, else 0.
ROWS = ("inner", "sketched_before", "sketched_now", "before", "now", "variance")

# The largest standard error of a cosine that is told at all: half of the bound on the error.
LARGEST_ERROR = 0.01

_MIXED = (
    "parameters that had a gradient in one of the two steps only outweigh those that had one in both: "
    "the estimate's error would be too large"
)

NO_GRADIENT = "no parameter had a gradient other than zero in both steps"
_NOT_FINITE = "a gradient of one of the two steps is not finite, or too large to be multiplied"


class Products(NamedTuple):
    """What two consecutive gradients have in common, for the noise scale.

    Args:
        inner: ⟨g_t, g_{t-1}⟩ over the parameters with gradients in both steps.
        before: ‖g_{t-1}‖² over the same.
        now: ‖g_t‖² over the same.
    """

    inner: float
    before: float
    now: float


@dataclass(frozen=True)
class Cosines:
    """Cosines of blocks, and of everything. ``error`` is 0 but where the two steps' parameters differ."""

    cosine: NDArray[np.float64]
    error: NDArray[np.float64]
    present: NDArray[np.bool_]
    inner: NDArray[np.float64]
    before: NDArray[np.float64]
    now: NDArray[np.float64]
    total: float
    total_error: float

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.float64]]) -> Cosines | None:
        tables = [array for key, array in arrays.items() if key.startswith("cosine/")]
        if not tables:
            return None
        inner, left, right, before, now, variance = np.sum(tables, axis=0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            norms = np.sqrt(before) * np.sqrt(now)
            sketched = np.sqrt(left) * np.sqrt(right)
            mixed = variance > 0
            cosine = inner / np.where(mixed, norms, sketched)
            # A sketch of zero is a gradient of zero. NaN is not equal to zero, and stays.
            present = (norms != 0) & (sketched != 0)
            error = np.where(present & mixed, np.sqrt(variance) / norms, 0.0)
            inner = np.where(present, cosine * norms, 0.0)
            whole = math.sqrt(before.sum()) * math.sqrt(now.sum())
            total = float(inner.sum() / whole) if whole else math.nan
            shared = np.where(present, error * norms, 0.0)
            total_error = float(np.sqrt(np.square(shared).sum()) / whole) if whole else 0.0
        return cls(cosine, error, present, inner, before, now, total, total_error)


def why_not(cosine: float, error: float) -> str | None:
    """Why a cosine is not told, if it is not."""
    if error > LARGEST_ERROR:
        return _MIXED
    return None if math.isfinite(cosine) else _NOT_FINITE
