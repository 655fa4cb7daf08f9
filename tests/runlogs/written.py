"""Logs of every format, written from the facts of the format, with the numbers they hold.

Where a library can be installed, ``test_real.py`` has its own output; these are of the others too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

ESC = "\x1b"
STEPS = range(10, 410, 10)


@dataclass(frozen=True)
class Written:
    """A log, and what must come out of it."""

    format: str
    text: str
    #: By column: the value at each step of :data:`STEPS`, as the log has it.
    columns: dict[str, list[float]]
    steps: list[float] = field(default_factory=lambda: [float(step) for step in STEPS])
    total: int | None = None
    inferred: bool = False
    #: Single values besides: column, step, value.
    once: tuple[tuple[str, float, float], ...] = ()


def loss(step: int) -> float:
    return round(8.0 - step / 77, 4)


def rate(step: int) -> float:
    return float(f"{1e-3 / (1 + step / 9):.2e}")


def norm(step: int) -> float:
    return round(1 + (step % 70) / 30, 3)


def _lines(line: Callable[[int], str], steps: range = STEPS) -> str:
    return "".join(line(step) + "\n" for step in steps)


def _of(**make: Callable[[int], float]) -> dict[str, list[float]]:
    known = {"loss": "train/loss", "lr": "train/lr", "norm": "train/grad_norm"}
    return {known.get(name, name): [function(step) for step in STEPS] for name, function in make.items()}


def ours() -> Written:
    text = _lines(
        lambda s: (
            f"2026-11-30 00:{s // 60:02d}:{s % 60:02d},250 INFO step={s} loss={loss(s):.4f} "
            f"ce_loss={loss(s) + 1:.4f} lr={rate(s):.2e} grad_norm={norm(s):.3f} tok/s=5321 dt=0.52s "
            f"health/gns_source=rank "
            "health/grad_cosine_sim=0.42"
        )
    )
    columns = _of(loss=loss, lr=rate, norm=norm)
    columns |= {
        "train/ce_loss": [round(loss(s) + 1, 4) for s in STEPS],
        "train/step_time_s": [0.52 for _ in STEPS],
        "train/tokens_per_sec_global": [5321.0 for _ in STEPS],
        "health/grad_cosine_sim": [0.42 for _ in STEPS],
    }
    return Written("palingenesis_log", text, columns)


def transformers_5() -> Written:
    text = _lines(
        lambda s: (
            f"{{'loss': '{loss(s)}', 'grad_norm': '{norm(s)}', 'learning_rate': "
            f"'{rate(s)}', 'epoch': '{s / 400}'}}"
        )
    )
    text += "{'eval_loss': '4.6', 'eval_runtime': '0.1434', 'epoch': '1'}\n"
    text += "{'train_runtime': '7.2', 'train_loss': '3.1', 'epoch': '1'}\n"
    counted = [float(place) for place, _ in enumerate(STEPS, 1)]
    columns = _of(loss=loss, lr=rate, norm=norm)
    once = (("eval/loss", counted[-1], 4.6), ("train/eval_s", counted[-1], 0.1434))
    return Written("transformers", text, columns, counted, inferred=True, once=once)


def transformers_4() -> Written:
    bar = "  3%|▎         | {at}/400 [00:05<08:00,  2.03it/s]\r"
    text = _lines(
        lambda s: (
            bar.format(at=s)
            + f"{{'loss': {loss(s)}, 'grad_norm': {norm(s)}, 'learning_rate': {rate(s)}, 'epoch': "
            f"{s / 400:.2f}, "
            "'entropy': 1.25, 'mean_token_accuracy': 0.5, 'num_tokens': 1000.0}"
        )
    )
    columns = _of(loss=loss, lr=rate, norm=norm)
    columns |= {"health/output_entropy": [1.25 for _ in STEPS], "train/token_accuracy": [0.5 for _ in STEPS]}
    return Written("transformers", text, columns, total=400, inferred=True)


def trainer_state() -> Written:
    history = [
        {"epoch": s / 400, "grad_norm": norm(s), "learning_rate": rate(s), "loss": loss(s), "step": s}
        for s in STEPS
    ]
    history.append({"epoch": 1.0, "eval_loss": 4.5, "step": 400})
    text = json.dumps({"global_step": 400, "log_history": history, "max_steps": 500}, indent=2)
    once = (("eval/loss", 400.0, 4.5),)
    return Written("trainer_state", text, _of(loss=loss, lr=rate, norm=norm), total=500, once=once)


def llamafactory() -> Written:
    text = _lines(
        lambda s: json.dumps(
            {
                "current_steps": s,
                "total_steps": 800,
                "loss": loss(s),
                "lr": rate(s),
                "epoch": 0.1,
                "percentage": 1.0,
            }
            | {"elapsed_time": "0:00:10", "remaining_time": "0:01:30"}
        )
    )
    return Written("llamafactory", text, _of(loss=loss, lr=rate), total=800)


def ms_swift() -> Written:
    text = _lines(
        lambda s: json.dumps(
            {
                "loss": loss(s),
                "grad_norm": norm(s),
                "learning_rate": rate(s),
                "global_step/max_steps": f"{s}/11043",
            }
        )
    )
    return Written("ms_swift", text, _of(loss=loss, lr=rate, norm=norm), total=11043)


def jsonl() -> Written:
    text = _lines(
        lambda s: json.dumps(
            {
                "step": s,
                "train": {"loss": loss(s), "lr": rate(s)},
                "grad_norm": norm(s),
                "note": "fine",
                "flag": True,
            }
        )
    )
    return Written("jsonl", text, _of(loss=loss, lr=rate, norm=norm))


def torchtune() -> Written:
    text = _lines(
        lambda s: (
            f"Step {s} | loss:{loss(s)} lr:{rate(s)} tokens_per_second_per_gpu:1234.5 grad_norm:{norm(s)}"
        )
    )
    columns = _of(loss=loss, lr=rate, norm=norm) | {"train/tokens_per_sec": [1234.5 for _ in STEPS]}
    return Written("torchtune", text, columns)


def torchtitan() -> Written:
    text = _lines(
        lambda s: (
            f"{ESC}[32m[titan] 2026-01-01 00:00:00,000 - root - INFO - {ESC}[31mstep: {s:2d}  {ESC}[32mloss: "
            f"{loss(s):8.5f}  {ESC}[38;2;180;60;0mgrad_norm: {norm(s):7.4f}  {ESC}[34mmemory: "
            f"40.12GiB(50.00%)  "
            f"{ESC}[36mtps: {900 + s:,}  {ESC}[35mtflops: 123.45  {ESC}[33mmfu: 12.34%{ESC}[39m"
        )
    )
    text += (
        "[titan] - root - INFO - validate step: 400  loss:  7.1234  memory: 40.12GiB(50.00%)  tps: 1,234\n"
    )
    columns = _of(loss=loss, norm=norm)
    columns["train/tokens_per_sec"] = [900.0 + s for s in STEPS]
    columns["health/cuda_peak_gb"] = [40.12 * 2**30 / 1e9 for _ in STEPS]
    columns["train/mfu"] = [0.1234 for _ in STEPS]
    return Written("torchtitan", text, columns, once=(("eval/loss", 400.0, 7.1234),))


def nanotron() -> Written:
    def three(value: float) -> float:
        return float(f"{value:.3g}")

    text = _lines(
        lambda s: (
            f"01/31/2026 00:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: {s} / 500 | consumed_tokens: 1.02K | "
            "elapsed_time_per_iteration_ms: 1.5K | tokens_per_sec: 12.3K | tokens_per_sec_per_gpu: 1.5K | "
            f"global_batch_size: 8 | lm_loss: {loss(s):.3g} | lr: {rate(s):.3g} | grad_norm: {norm(s):.3g}"
        )
    )
    columns = _of(loss=lambda s: three(loss(s)), lr=lambda s: three(rate(s)), norm=lambda s: three(norm(s)))
    columns |= {"train/step_time_s": [1.5 for _ in STEPS], "train/tokens_per_sec": [1500.0 for _ in STEPS]}
    return Written("nanotron", text, columns, total=500)


def megatron() -> Written:
    text = _lines(
        lambda s: (
            f" [2026-01-01 00:00:{s % 60:02d}.{s:06d}] iteration {s:8d}/     500 | consumed samples: "
            f"{16 * s:12d} "
            f"| elapsed time per iteration (ms): 1234.5 | learning rate: {rate(s):.6E} | global batch "
            f"size:    16 | "
            f"lm loss: {loss(s):.6E} | loss scale: 1.0 | grad norm: {norm(s):.3f} | number of skipped "
            f"iterations: "
            f"{2 * (s == 200):3d} | number of nan iterations:   0 |"
        )
    )
    text += " validation loss at iteration 400 | lm loss value: 5.100000E+00 | lm loss PPL: 1.640219E+02 | \n"
    columns = _of(loss=loss, lr=rate, norm=norm) | {"train/step_time_s": [1.2345 for _ in STEPS]}
    once = (("eval/loss", 400.0, 5.1), ("train/skipped_steps", 400.0, 2.0))
    return Written("megatron", text, columns, total=500, once=once)


def deepspeed() -> Written:
    text = _lines(
        lambda s: (
            f"[2026-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=1, "
            f"lr=[{rate(s)}], mom=[(0.9, 0.999)]\nsteps: {s} loss: {loss(s):.4f} iter time (s): 0.123 "
            f"samples/sec: 65.0"
        )
    )
    text += "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempting loss scale: 65536, reducing to 32768.0\n"
    return Written("deepspeed", text, _of(loss=loss, lr=rate))


def lightning() -> Written:
    text = "epoch,step,train_loss,val_loss\n" + _lines(lambda s: f"0,{s},{loss(s)},") + "0,400,,2.5\n"
    return Written("lightning", text, _of(loss=loss), once=(("eval/loss", 400.0, 2.5),))


def wandb_csv() -> Written:
    head = '"Step","run - train/loss","run - train/loss__MIN","run - train/loss__MAX"\n'
    return Written("wandb_csv", head + _lines(lambda s: f'"{s}","{loss(s)}","1","2"'), _of(loss=loss))


def olmo() -> Written:
    text = _lines(
        lambda s: (
            f"2026-01-01 00:00:00\thost:0\ttrain:1\tINFO\t[step={s}/5,000,epoch=1,eta=0:01:40]\n"
            f"    optim/LR (group 0)={rate(s)}\n    optim/total grad norm={norm(s)}\n    train/CE "
            f"loss={loss(s)}\n"
            f"    throughput/device/TPS={10000 + s:,}"
        )
    )
    columns = _of(loss=loss, lr=rate, norm=norm) | {"train/tokens_per_sec": [10000.0 + s for s in STEPS]}
    return Written("olmo_core", text, columns, total=5000)


def llmc() -> Written:
    text = _lines(
        lambda s: (
            f"step {s:4d}/19560 | loss {loss(s):.6f} (+nanz)| norm {norm(s):.4f} (+0.12z)| lr "
            f"{rate(s):.2e} | "
            "1234.56 ms | 40.0% bf16 MFU | 425000 tok/s"
        )
    )
    columns = _of(loss=loss, lr=rate, norm=norm) | {"train/mfu": [0.4 for _ in STEPS]}
    return Written(
        "llm.c", text + "val loss 10.9321\n", columns, total=19560, once=(("eval/loss", 400.0, 10.9321),)
    )


def nanogpt() -> Written:
    text = "step 0: train loss 2.2365, val loss 1.9580\n"
    text += _lines(
        lambda s: f"iter {s}: loss {loss(s):.4f}, time 30728.83ms, mfu {-100 if s < 50 else 12.5:.2f}%"
    )
    return Written("nanogpt", text, _of(loss=loss), once=(("eval/loss", 0.0, 1.958),))


def nanochat() -> Written:
    text = _lines(
        lambda s: (
            f"step {s:05d} (1.23%) | loss: {loss(s):.6f} | lrm: 1.00 | dt: 12.34ms | tok/sec: 12,345 | "
            f"mfu: 1.23"
        )
    )
    text += "Step 00400 | Validation bpb: 1.2345\n"
    columns = _of(loss=loss) | {"train/tokens_per_sec_global": [12345.0 for _ in STEPS]}
    return Written("nanochat", text, columns, once=(("other/validation_bpb", 400.0, 1.2345),))


def pairs() -> Written:
    text = _lines(
        lambda s: f"Epoch 1/10, Step {s}/5000, Loss: {loss(s):.4f}, lr = {rate(s)}, grad norm {norm(s)}"
    )
    return Written("pairs", text, _of(loss=loss, lr=rate, norm=norm), total=5000)


def step_and_number() -> Written:
    return Written("step_and_number", _lines(lambda s: f"{s}\t{loss(s)}"), _of(loss=loss))


def numbers() -> Written:
    counted = [float(place) for place, _ in enumerate(STEPS, 1)]
    return Written("numbers", _lines(lambda s: f"{loss(s)}"), _of(loss=loss), counted, inferred=True)


ALL: dict[str, Written] = {
    make.__name__: make()
    for make in (
        ours,
        transformers_5,
        transformers_4,
        trainer_state,
        llamafactory,
        ms_swift,
        jsonl,
        torchtune,
        torchtitan,
        nanotron,
        megatron,
        deepspeed,
        lightning,
        wandb_csv,
        olmo,
        llmc,
        nanogpt,
        nanochat,
        pairs,
        step_and_number,
        numbers,
    )
}
