"""What happened between two checks, folded on the device at every step without a host read."""

from __future__ import annotations

import torch

ROWS = ("peak", "peak_step", "first_nonfinite", "present_steps", "last_present")


class Guard:
    """Running facts about ``size`` norms since the last check.

    ``values`` is ``[5, size]``, in the order of ``ROWS``: the largest finite norm, its step, the first step
    with a non-finite norm, how many steps had a norm that was not exactly zero, and the last of those.
    """

    def __init__(self, size: int, like: torch.Tensor) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.values = torch.zeros(len(ROWS), size, dtype=like.dtype, device=like.device)
        self.steps = 0

    def fold(self, step: int, norms: torch.Tensor) -> None:
        """Take in one step's norms, ``[size]``."""
        peak, peak_step, first, present, last = self.values
        finite = torch.isfinite(norms)
        # NaN compares false, infinity is taken out by the mask: only finite norms can be a peak.
        larger = (norms > peak) & finite
        torch.where(larger, norms, peak, out=peak)
        peak_step.masked_fill_(larger, step)
        first.masked_fill_(~finite & (first == 0), step)
        there = norms != 0
        present.add_(there)
        last.masked_fill_(there, step)
        self.steps += 1

    def reset(self) -> None:
        self.values.zero_()
        self.steps = 0
