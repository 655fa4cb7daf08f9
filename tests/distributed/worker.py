"""What one rank does: every case for this number of ranks, started by ``launch.py`` with torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import rank_cases, replica_cases, sharding_cases


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for module in (sharding_cases, replica_cases, rank_cases):
        for name, case in module.CASES[dist.get_world_size()].items():
            torch.manual_seed(0)
            try:
                found[name] = case()
            except Exception:  # noqa: BLE001 - told to the test, which fails with it
                found[name] = {"error": traceback.format_exc()}
            dist.barrier()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
