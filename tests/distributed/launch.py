"""Starts the workers of ``worker.py`` once for each group and number of ranks, and keeps what they saw."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240

# For every test that starts processes.
marks = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


@functools.cache
def _started(ranks: int, group: str) -> dict[str, list[dict[str, Any]]] | str:
    """What each rank saw, by case; what went wrong if they did not all end."""
    # `--standalone` lets torchrun find a free port.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        started = subprocess.Popen(
            [*command, str(WORKER), folder, group],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = started.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.terminate()  # unlike `kill`, this ends the workers too
            started.communicate()
            return f"{group}: no end after {TIMEOUT_S} s"
        if started.returncode:
            return errors[-4000:]
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        by_rank = [json.loads(file.read_text()) for file in files]
    return {case: [seen[case] for seen in by_rank] for case in by_rank[0]}


def seen(case: str, ranks: int = 2, group: str = "signals") -> list[dict[str, Any]]:
    """What each rank saw in a case, in the order of ranks."""
    cases = _started(ranks, group)
    assert isinstance(cases, dict), cases
    found = cases[case]
    errors = [one["error"] for one in found if "error" in one]
    assert not errors, errors[0]
    return found
