"""Findings: what is wrong with a run or a setup, how much it matters, and which option to change.

Numbers and events in, findings out; :mod:`~palingenesis.findings.catalog` says what each of them means, and
:mod:`~palingenesis.findings.render` shows them. Torch is not imported here.
"""

from __future__ import annotations

from palingenesis.findings.finding import Finding, Report

__all__ = ["Finding", "Report"]
