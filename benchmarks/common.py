"""What the benchmarks share: models of a size, text to train on, timing, and how figures are told."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

# Of a Llama-style model: hidden size, blocks and vocabulary, by about how many million parameters it has.
SIZES = {
    1: (128, 4, 2048),
    3: (256, 3, 2048),
    10: (384, 5, 2048),
    30: (512, 8, 8192),
    100: (768, 12, 16384),
    300: (1024, 21, 32000),
}


def llama(millions: int, device: torch.device | None = None) -> LlamaForCausalLM:
    """A model of a size in ``SIZES``, with the weights of a fixed seed."""
    torch.manual_seed(0)
    hidden, blocks, vocabulary = SIZES[millions]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device)


class Text:
    """Endless text that can be learned: words follow one another with fixed chances, some far more often.

    Args:
        vocabulary: how many words there are.
        device: where batches are wanted.
    """

    FOLLOWERS = 16
    LENGTH = 512

    def __init__(self, vocabulary: int, device: torch.device | None = None) -> None:
        self._device = device
        self._random = torch.Generator().manual_seed(0)
        self._next = torch.randint(0, vocabulary, (vocabulary, self.FOLLOWERS), generator=self._random)
        self._often = 1 / torch.arange(1, self.FOLLOWERS + 1)
        self._anew = 1 / torch.arange(1, vocabulary + 1)

    def batch(self, tokens: int) -> dict[str, torch.Tensor]:
        """Rows of at most ``LENGTH`` tokens, and themselves as labels."""
        rows, length = max(1, tokens // self.LENGTH), min(tokens, self.LENGTH)
        fresh = torch.multinomial(self._anew, rows * length, True, generator=self._random).view(length, rows)
        choice = torch.multinomial(self._often, rows * length, True, generator=self._random)
        words = [fresh[0]]
        begins = torch.rand(length, rows, generator=self._random) < 0.2
        for new, follower, begin in zip(fresh[1:], choice.view(length, rows)[1:], begins[1:], strict=True):
            words.append(torch.where(begin, new, self._next[words[-1], follower]))
        ids = torch.stack(words, dim=1).to(self._device)
        return {"input_ids": ids, "labels": ids}


def seconds(call: Callable[[], object], device: torch.device | None = None) -> float:
    """How long a call takes: on an accelerator with what it leaves to do there, else in CPU time.

    CPU time of the process does not count what others do on the same cores.
    """
    if device is None or device.type != "cuda":
        begin = time.process_time()
        call()
        return time.process_time() - begin
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def median_ratio(rows: Sequence[Mapping[str, float]], names: Sequence[str], unit: str) -> float:
    """Median over rounds of what some things took together, in units timed in the same round."""
    return statistics.median(sum(row[name] for name in names) / row[unit] for row in rows)


def describe(model: nn.Module) -> str:
    size = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    return f"{size / 1e6:.1f} M parameters in {tensors} tensors, torch {torch.__version__}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark understands."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the figures there too")
    return made


def tell(figures: Mapping[str, float]) -> None:
    """Print figures one a line."""
    for name, value in figures.items():
        print(f"{name:48} {value:10.3f}", flush=True)


def save(figures: Mapping[str, object], file: Path | None) -> None:
    """Write figures to a file, if one is wanted."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def tell_rows(rows: Sequence[Mapping[str, float]]) -> None:
    """Print figures as a table with one column a name."""
    print("".join(f"{name:>26}" for name in rows[0]))
    for row in rows:
        print(
            "".join(f"{value:26d}" if isinstance(value, int) else f"{value:26.3f}" for value in row.values())
        )
