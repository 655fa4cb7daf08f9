"""What a loss curve shows by itself: :func:`analyse` gives a :class:`CurveAnalysis`, ``told`` its findings.

One file a question: spikes, plateaus (``flat``), the end (``tail``), periods, convergence, the first loss.
All are judged by :class:`CurveLimits` and measured in ``benchmarks/curves``.
"""

from __future__ import annotations

from palingenesis.findings.curve.analysis import CurveAnalysis, analyse
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.told import findings_of

__all__ = ["CurveAnalysis", "CurveLimits", "analyse", "findings_of"]
