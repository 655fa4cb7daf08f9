"""What one rank does: a group's cases for this number of ranks; ``launch.py`` starts it with torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import (
    apart_cases,
    gate_cases,
    memory_cases,
    patience_cases,
    rank_cases,
    reading_cases,
    replica_cases,
    sharding_cases,
)

GROUPS = {
    "signals": (sharding_cases.CASES, replica_cases.CASES, rank_cases.CASES),
    "readings": (reading_cases.CASES,),
    "patience": (patience_cases.CASES,),
    "spectrum": (patience_cases.SPECTRUM_CASES,),
    "apart": (apart_cases.CASES,),
    "gates": (gate_cases.CASES,),
    "memory": (memory_cases.CASES,),
}


def main(folder: Path, group: str, only: str = "") -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for cases in GROUPS[group]:
        for name, case in cases[dist.get_world_size()].items():
            if only not in name:
                continue
            torch.manual_seed(0)
            try:
                found[name] = case()
            except Exception:  # noqa: BLE001 - told to the test, which fails with it
                found[name] = {"error": traceback.format_exc()}
            dist.barrier()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
