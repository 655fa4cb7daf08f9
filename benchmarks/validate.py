"""How fast ``pgs validate --all`` goes through conversations of about 500 tokens, on two processes.

    python benchmarks/validate.py [--rows 8000] [--processes 2]

Prints one JSON document: rows a minute while working, the same over the whole command, and how long 100,000
rows take at that rate, with the time that processes need to start counted once. On a machine that does other
things as well, wall time says little: rows a CPU second, on one thread, and what follows from it for idle
processors, are given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

TOKENS = 500
GOAL_ROWS, GOAL_SECONDS = 100_000, 180
#: What two processes take to start on an idle machine.
START_SECONDS = 10


def write_rows(path: Path, count: int, tokenizer: Any) -> float:
    """Conversations of one to three answers, each of about ``TOKENS`` tokens; their mean length."""
    from palingenesis.demo.corpus import load_conversations

    draw = random.Random(0)
    words = [word for turns in load_conversations() for turn in turns for word in turn.split()]
    per_word = len(tokenizer(" ".join(words[:5000]))["input_ids"]) / 5000
    lengths = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            turns = 2 * draw.randint(1, 3)
            each = int(TOKENS / per_word / turns)
            messages = [
                {
                    "role": ("user", "assistant")[turn % 2],
                    "content": " ".join(draw.choice(words) for _ in range(each)),
                }
                for turn in range(turns)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
            if number < 100:
                lengths.append(len(tokenizer(" ".join(each["content"] for each in messages))["input_ids"]))
    return sum(lengths) / len(lengths)


def rows_a_cpu_second(config: Any) -> float:
    """The work of one process, without reading and starting."""
    from palingenesis.preflight.samples import rows_of, sources_of
    from palingenesis.preflight.target import tokenizer_of
    from palingenesis.preflight.validate_work import Examiner

    rows = list(rows_of(sources_of(config, "train"), 2000))
    examiner = Examiner(config, tokenizer_of(config), "train")
    examiner.examine(rows[:100])
    start = time.process_time()
    examiner.examine(rows)
    return len(rows) / (time.process_time() - start)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=8000)
    options.add_argument("--processes", type=int, default=2)
    given = options.parse_args()

    from palingenesis.preflight.target import target_of, tokenizer_of
    from palingenesis.preflight.validate import validate

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        config = target_of(None, (), "demo:tiny-chat", str(data))
        mean = write_rows(data, given.rows, tokenizer_of(config))
        ticks: list[tuple[float, int]] = []
        start = time.perf_counter()
        report = validate(
            config,
            num_samples=None,
            processes=given.processes,
            progress=lambda rows: ticks.append((time.perf_counter(), rows)),
        )
        whole = time.perf_counter() - start
        parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        cpu_rate = rows_a_cpu_second(config)
    # The first parts come once the processes have started: what follows is the rate of work.
    skipped = 2 * given.processes
    working = ticks[-1][0] - ticks[skipped - 1][0]
    rate = sum(rows for _, rows in ticks[skipped:]) / working
    starting = whole - given.rows / rate
    seconds = starting + GOAL_ROWS / rate
    document = {
        "rows": given.rows,
        "tokens_a_row": round(report.facts["train"]["length"]["mean"] or mean),
        "processes": given.processes,
        "rows_per_minute": round(60 * rate),
        "rows_per_minute_with_start": round(60 * given.rows / whole),
        "seconds_for_100000_rows": round(seconds, 1),
        "rows_a_cpu_second": round(cpu_rate),
        "seconds_for_100000_rows_if_idle": round(GOAL_ROWS / (cpu_rate * given.processes) + START_SECONDS, 1),
        "load": os.getloadavg()[0],
        "goal_seconds": GOAL_SECONDS,
        "reached": seconds < GOAL_SECONDS,
        "peak_mib": {"main": round(parent), "largest_process": round(child)},
        "findings": [finding.check for finding in report.findings],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
