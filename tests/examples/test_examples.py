"""Every example runs as it is, ends HEALTHY, and says where its report is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LONGEST = 40


def test_all_four_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["hf_trainer", "lightning_module", "raw_loop", "trl_sft"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict, report = done.stdout.splitlines()[-2:]
    assert verdict.startswith("HEALTHY: ")
    assert (tmp_path / report.removeprefix("report: ")).is_file()
    assert len(path.read_text("utf-8").splitlines()) < LONGEST
