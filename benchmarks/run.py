"""Every benchmark that fits into a few minutes, each in a process of its own: what ``make bench`` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (
    ("overhead.py",),
    ("growth.py",),
    ("tiers.py", "--lr", "2e-5"),
    ("tiers.py", "--lr", "3e-4"),
    ("validate.py",),
    ("memory.py",),
    ("runlogs.py",),
    ("curves/table.py", "--healthy", "100", "--faulty", "20"),
    ("device.py",),
)


def main() -> int:
    for script, *arguments in SCRIPTS:
        print("==", script, *arguments, flush=True)
        done = subprocess.run([sys.executable, str(HERE / script), *arguments], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
