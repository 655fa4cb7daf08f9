"""The demonstration's training loop, monitored as anyone would monitor their own.

Cross-entropy on the next token, AdamW with a warm-up, clipping after the monitor has looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from palingenesis.config import MonitorConfig
from palingenesis.demo.corpus import load_conversations
from palingenesis.demo.faults import PlannedFault, break_layer
from palingenesis.demo.model import CONTEXT, build_model
from palingenesis.demo.options import CHECK_EVERY, CHECKS_BEFORE_ALARMS, LOSS_WINDOW
from palingenesis.demo.result import DemoRun
from palingenesis.demo.tokens import batches, token_blocks, train_tokenizer
from palingenesis.monitor import Monitor
from palingenesis.record.format import REPORT_FILE

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BATCH_SIZE = 8
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20
MAX_NORM = 1.0


@dataclass(frozen=True)
class TrainingText:
    """The tokenized conversations, made once and used by both runs."""

    vocabulary: int
    blocks: torch.Tensor


def prepare_text() -> TrainingText:
    """Read the conversations, train the tokenizer on them, and cut them into blocks."""
    conversations = load_conversations()
    tokenizer = train_tokenizer(conversations)
    return TrainingText(tokenizer.get_vocab_size(), token_blocks(conversations, tokenizer, CONTEXT))


@contextmanager
def one_thread() -> Iterator[None]:
    """A model this small gains little from a second thread, and loses much on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train(
    text: TrainingText,
    folder: Path,
    *,
    name: str,
    steps: int,
    seed: int,
    planned: PlannedFault | None,
    on_step: Callable[[int, float], None],
) -> DemoRun:
    """One monitored run; with ``planned``, its fault is put in after the step that it names."""
    started = time.perf_counter()
    model = build_model(text.vocabulary, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    losses: list[float] = []

    monitor = Monitor(
        model,
        optimizer,
        out=folder,
        name=name,
        # From random weights every model drifts far.
        config=MonitorConfig(drift="off"),
        check_every=CHECK_EVERY,
        warmup=CHECKS_BEFORE_ALARMS,
        overwrite=True,
    )
    with monitor:
        for step, batch in enumerate(islice(batches(text.blocks, BATCH_SIZE, seed), steps), start=1):
            loss = next_token_loss(model, batch)
            loss.backward()
            monitor.step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            on_step(step, losses[-1])
            if planned is not None and step == planned.after_step:
                break_layer(model, planned.layer, planned.fault)

    return DemoRun(
        folder=folder,
        report=folder / REPORT_FILE,
        verdict=monitor.verdict,
        first_alarm=next((event for event in monitor.events if event.event == "alarm"), None),
        first_loss=_mean(losses[:LOSS_WINDOW]),
        last_loss=_mean(losses[-LOSS_WINDOW:]),
        seconds=time.perf_counter() - started,
    )


def next_token_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token given those before it."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
