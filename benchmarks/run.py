"""Every benchmark that fits into a few minutes, each in a process of its own: what ``make bench`` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    for script in ("overhead.py", "growth.py", "tiers.py", "validate.py", "memory.py", "device.py"):
        print(f"== {script}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / script)], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
