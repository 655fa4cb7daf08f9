"""What monitoring costs on a Llama-style model of about 30 M parameters, as ratios within one run.

    python benchmarks/overhead.py [--rounds 40] [--steps 10] [--json FILE]

One thread. Every figure is a median over rounds in which all things compared are timed in turn, so that a
machine whose speed drifts slows them alike. The unit is one bare pass of ``torch._foreach_norm`` over the
same gradients, and the training step.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from palingenesis import Monitor, MonitorConfig

NEVER = 10**9


def model_of_30m() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def batch(tokens: int) -> dict[str, torch.Tensor]:
    length = min(tokens, 512)
    ids = torch.randint(0, 8192, (tokens // length, length))
    return {"input_ids": ids, "labels": ids}


def per_call(model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
    """A check and the steps between checks, in passes over the gradients (and microseconds)."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch(128)).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    loss = torch.tensor(1.0)

    def monitor(check_every: int, guard: bool) -> Monitor:
        config = MonitorConfig(check_every=check_every, guard_every_step=guard)
        return Monitor(model, optimizer, out=None, config=config)

    calls: dict[str, Callable[[], object]] = {"pass": lambda: torch._foreach_norm(gradients)}
    for name, every, guard in (
        ("check", 1, False),
        ("check_with_guard", 1, True),
        ("step_with_guard", NEVER, True),
        ("step_without_guard", NEVER, False),
    ):
        one = monitor(every, guard)
        calls[name] = lambda one=one: one.step(loss)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 5):
        for name, call in calls.items():
            took = seconds(call)
            if number >= 5:
                times[name].append(took)
    ratios = {
        f"{name}_passes": statistics.median(a / b for a, b in zip(times[name], times["pass"], strict=True))
        for name in calls
        if name != "pass"
    }
    ratios["pass_ms"] = 1e3 * statistics.median(times["pass"])
    ratios["step_without_guard_us"] = 1e6 * statistics.median(times["step_without_guard"])
    return ratios


def per_training_step(model: LlamaForCausalLM, tokens: int, steps: int) -> dict[str, float]:
    """Share of the training step at defaults: 49 guarded steps and one check in fifty."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    guarded = Monitor(model, optimizer, out=None, check_every=NEVER)
    checking = Monitor(model, optimizer, out=None, check_every=1)
    shares = []
    for _ in range(steps):
        data = batch(tokens)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        middle = time.perf_counter()
        guard_time = seconds(lambda loss=loss: guarded.step(loss))
        check_time = seconds(lambda loss=loss: checking.step(loss))
        optimizer_time = seconds(optimizer.step)
        step_time = middle - begin + optimizer_time
        shares.append((49 * guard_time + check_time) / 50 / step_time)
    return {
        f"share_of_step_at_{tokens}_tokens_pct": 100 * statistics.median(shares),
        f"training_step_at_{tokens}_tokens_s": step_time,
    }


def memory(model: LlamaForCausalLM) -> dict[str, float]:
    """Bytes that a monitor holds after some checks, against the model's parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    monitor = Monitor(model, optimizer, out=None, check_every=1)
    loss = torch.tensor(1.0)
    for _ in range(20):
        monitor.step(loss)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors = sum(
        device.guard.values.nbytes + (device.norms.nbytes if device.norms is not None else 0)
        for device in monitor._gatherer.reader._devices
        if device.guard is not None
    )
    held = after - before + tensors
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return {"memory_held_kb": held / 1e3, "memory_held_pct_of_model": 100 * held / parameters}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="training steps timed at 512 tokens")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    model = model_of_30m()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{size / 1e6:.1f} M parameters in {len(list(model.parameters()))} tensors, torch {torch.__version__}"
    )
    figures = per_call(model, given.rounds)
    figures |= per_training_step(model, 512, given.steps)
    figures |= per_training_step(model, 4096, max(3, given.steps // 5))
    figures |= memory(model)
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
