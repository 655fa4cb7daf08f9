"""A small part of benchmarks/curves: what is measured there holds for curves that no limit was chosen by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "curves"))

from made import FAULTS, faulty, healthy
from table import seen, wrong

from palingenesis.findings.curve import analyse

#: Seeds of other curves than those of the table.
FIRST = 50_000


@pytest.mark.slow
def test_healthy_curves_are_quiet() -> None:
    told = [wrong(None, made, analyse(made.log)) for made in map(healthy, range(FIRST, FIRST + 30))]
    assert sum(map(len, told)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    found = planted = 0
    for seed in range(FIRST, FIRST + 6):
        made = faulty(fault, seed)
        hits, of = seen(fault, made, analyse(made.log))
        found, planted = found + hits, planted + of
    assert found >= 0.6 * planted
