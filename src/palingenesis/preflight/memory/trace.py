"""Trace: a step's log as an array, and what follows from it: the peak, what it is made of, the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from palingenesis.preflight.memory.categories import SHOWN, Category, Phase

_STORAGE, _BYTES, _CATEGORY, _PHASE = range(4)


@dataclass(frozen=True)
class Trace:
    """A step's log.

    Attributes:
        rows: ``[n, 4]``, int64: storage, bytes, category, phase, as ``StorageLog`` has them.
    """

    rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Trace:
        """From a log's rows."""
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 4))

    def used(self) -> Use:
        """Memory over the step."""
        categories, phases = self.rows[:, _CATEGORY], self.rows[:, _PHASE]
        # A running sum for every category would be wide; the total tells where to look.
        sizes = self.rows[:, _BYTES]
        total = sizes.cumsum()
        step = phases != Phase.SETUP
        inside = np.where(step, total, -1)
        at = int(inside.argmax())
        made_of = np.bincount(categories[: at + 1], sizes[: at + 1], minlength=len(Category))
        shown = {name: round(float(sum(made_of[one] for one in parts))) for name, parts in SHOWN.items()}
        if not shown["communication"]:
            del shown["communication"]  # one rank, or a part of the step without
        return Use(
            peak=int(inside[at]),
            made_of=shown,
            phase=Phase(int(phases[at])),
            by_phase={
                phase: int(inside[phases == phase].max())
                for phase in Phase
                if phase != Phase.SETUP and (phases == phase).any()
            },
            loss_peak=self._largest(Category.LOSS),
            curve=total[step],
            phases=phases[step],
        )

    def _largest(self, category: Category) -> int:
        mine = self.rows[self.rows[:, _CATEGORY] == category, _BYTES]
        return int(mine.cumsum().max()) if len(mine) else 0


@dataclass(frozen=True)
class Use:
    """Memory of one step on one rank, in bytes.

    Attributes:
        peak: the most at any moment.
        made_of: the peak by category; adds up to it.
        phase: the part of the step that the peak is in.
        by_phase: the most in each part.
        loss_peak: the most that the LM head and the objective have at any moment, theirs alone.
        curve: what is in use after every allocation and release, in order.
        phases: the part of the step that each point of the curve is in.
    """

    peak: int
    made_of: dict[str, int]
    phase: Phase
    by_phase: dict[Phase, int]
    loss_peak: int
    curve: npt.NDArray[np.int64]
    phases: npt.NDArray[np.int64]
