"""How fast logs are read: megabytes a second of one core, by format, and memory for a row.

    python benchmarks/runlogs.py --megabytes 200

Logs are made up, a row a step, with numbers that all differ. The time is that of the process, so that other
work on the machine counts little; the best of the runs counts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from palingenesis.runlogs.read import read_log

_random = random.Random(0).random


def _clock(step: int) -> str:
    return f"{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"


def _ours(step: int) -> str:
    return (
        f"2026-11-30 {_clock(step)},089 INFO step={step} loss={3 - _random():.4f} lr={1e-3 * _random():.2e} "
        f"grad_norm={_random():.3f} tok/s={5000 + 1000 * _random():.0f} dt={_random():.2f}s "
        f"health/token_efficiency={_random():.4g} health/padding_pct={50 * _random():.4g}"
    )


def _megatron(step: int) -> str:
    return (
        f" [2026-01-01 {_clock(step)}.{step % 1000000:06d}] iteration {step:8d}/ 9000000 | consumed samples: "
        f"{16 * step:12d} | elapsed time per iteration (ms): {1000 + 200 * _random():.1f} | learning rate: "
        f"{1e-4 * _random():.6E} | global batch size:    16 | lm loss: {3 - _random():.6E} | loss "
        f"scale: 1.0 | "
        f"grad norm: {_random():.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def _transformers(step: int) -> str:
    return (
        f"{{'loss': '{3 - _random():.4g}', 'grad_norm': '{_random():.4g}', 'learning_rate': "
        f"'{1e-4 * _random():.4g}', "
        f"'epoch': '{step / 10000:.4g}'}}"
    )


def _jsonl(step: int) -> str:
    return (
        f'{{"step": {step}, "train/loss": {3 - _random()!r}, "train/lr": {1e-4 * _random()!r}, '
        f'"train/grad_norm": {_random()!r}, "time": {1796000301.5 + step!r}}}'
    )


def _torchtitan(step: int) -> str:
    return (
        f"\x1b[32m[titan] 2026-01-01 {_clock(step)},000 - root - INFO - \x1b[31mstep: {step:2d}  "
        f"\x1b[32mloss: "
        f"{8 - _random():8.5f}  \x1b[38;2;180;60;0mgrad_norm: {_random():7.4f}  \x1b[34mmemory: "
        f"40.12GiB(50.00%)  "
        f"\x1b[36mtps: {1000 + int(9000 * _random()):,}  \x1b[35mtflops: {100 + 9 * _random():.2f}  "
        f"\x1b[33mmfu: {12 + _random():.2f}%\x1b[39m"
    )


def _csv(step: int) -> str:
    return f"{step // 1000},{step},{3 - _random():.7f}," if step > 1 else "epoch,step,train_loss,val_loss"


def _mostly_others(step: int) -> str:
    """A row among fifty lines of another program."""
    if step % 50 == 0:
        return f"step={step} loss={3 - _random():.4f} lr=1e-4"
    return f"INFO worker {step % 8} loaded shard {step} of the data set from /data/shards/{step:06d}.tar"


KINDS: dict[str, Callable[[int], str]] = {
    "palingenesis": _ours,
    "Megatron-LM": _megatron,
    "transformers": _transformers,
    "JSONL, 17 digits": _jsonl,
    "torchtitan, colours": _torchtitan,
    "Lightning CSV": _csv,
    "rows among others": _mostly_others,
}
#: Lines that are made; a longer log has them again, with the steps going back.
LINES = 200_000


def write(path: Path, line: Callable[[int], str], megabytes: float) -> None:
    """A log of a size."""
    block = "".join(f"{line(step)}\n" for step in range(1, LINES + 1)).encode()
    size = int(megabytes * 1e6)
    with path.open("wb") as file:
        while size > 0:
            file.write(block if size >= len(block) else block[: block.rfind(b"\n", 0, size) + 1])
            size -= len(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"{'format':22}{'MB':>7}{'rows':>10}{'MB/s':>8}{'µs a line':>11}{'bytes a row held':>18}")
    with tempfile.TemporaryDirectory() as folder:
        for name, line in KINDS.items():
            path = Path(folder) / "log"
            write(path, line, options.megabytes)
            best, lines, rows = float("inf"), 0, 0
            for _ in range(options.runs):
                start = time.process_time()
                log = read_log(path)
                best = min(best, time.process_time() - start)
                lines, rows = log.lines, log.rows
                del log
            tracemalloc.start()
            log = read_log(path)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            size = path.stat().st_size / 1e6
            print(
                f"{name:22}{size:7.0f}{rows:10d}{size / best:8.0f}{best * 1e6 / max(lines, 1):11.2f}"
                f"{held / max(rows, 1):18.0f}",
                flush=True,
            )
            del log


if __name__ == "__main__":
    main()
