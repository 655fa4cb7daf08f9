"""Damaged logs, by the hundred thousand: no crash, tables that hold together, time that grows with size only.

    python benchmarks/fuzz_logs.py --logs 100000 --processes 2

Prints how many were read, how many refused, and the slowest by time for its size. Exit code 1 after any
failure.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.runlogs.damage import damaged
from tests.runlogs.test_fuzz import check, read_bytes

#: Seeds that one task reads.
TASK = 500
#: Microseconds of CPU time a byte, from which a log is slow. Reading line by line takes about 0.3; what does
#: not pay in a short log is trying every format and learning each kind of line: some thousand bytes of
#: damaged lines take 40, sixteen times as many of them half.
SLOW = 100.0
#: Bytes from which that is judged.
LARGE = 2000


def read(first: int) -> tuple[Counter[str], tuple[float, int], list[str]]:
    """A task: what came out, the slowest in microseconds a byte with its seed, and what failed."""
    counted: Counter[str] = Counter()
    slowest, failures = (0.0, 0), []
    for seed in range(first, first + TASK):
        data = damaged(seed)
        start = time.process_time()
        try:
            log = read_bytes(data)
            took = time.process_time() - start
            if log is not None:
                check(log)
            counted["refused" if log is None else log.format] += 1
        except Exception:  # noqa: BLE001 - any is a failure, and is told with its seed
            failures.append(f"seed {seed}: {traceback.format_exc(limit=-3)}")
            continue
        counted["bytes"] += len(data)
        if len(data) >= LARGE:
            slowest = max(slowest, (took * 1e6 / len(data), seed))
    return counted, slowest, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    counted: Counter[str] = Counter()
    slowest, failures = (0.0, 0), []
    start = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:
        for one, slow, failed in pool.map(read, range(options.first, options.first + options.logs, TASK)):
            counted += one
            slowest = max(slowest, slow)
            failures += failed
    size = counted.pop("bytes", 0) / 1e6
    for failure in failures[:10]:
        print(failure)
    print(
        f"{counted.total()} logs, {size:.0f} MB, {time.perf_counter() - start:.0f} s; {len(failures)} "
        f"failures"
    )
    print(", ".join(f"{name} {count}" for name, count in counted.most_common()))
    print(f"slowest: {slowest[0]:.2f} µs a byte (seed {slowest[1]}; limit {SLOW:g})")
    return int(bool(failures) or slowest[0] > SLOW)


if __name__ == "__main__":
    sys.exit(main())
