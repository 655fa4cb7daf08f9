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
    patience_cases,
    rank_cases,
    reading_cases,
    replica_cases,
    sharding_cases,
)

GROUPS = {
    "signals": (sharding_cases, replica_cases, rank_cases),
    "readings": (reading_cases,),
    "patience": (patience_cases,),
    "apart": (apart_cases,),
}


def main(folder: Path, group: str, only: str = "") -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for module in GROUPS[group]:
        for name, case in module.CASES[dist.get_world_size()].items():
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
