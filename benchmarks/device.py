"""What the signals cost on a CUDA device, and whether anything waits for it; skipped where there is none.

    python benchmarks/device.py [--json FILE]

Prints the figures of ``tiers.py`` for models of 30 and 300 M parameters, and how often a training step with a
monitor makes the host wait for the device more than the same step without one: never, it should be. Counted
are operations that PyTorch itself knows to wait (``torch.cuda.set_sync_debug_mode``), over steps at which
checks and all tiers are due, the noise scale's hooks included. Takes less than three minutes.
"""

from __future__ import annotations

import collections
import logging
import warnings

import torch
from common import Text, llama, parser, save, tell
from torch import nn

from palingenesis import Monitor, MonitorConfig
from tiers import measure

TOKENS = 512
STEPS, ACCUMULATED = 40, 2
CADENCE = MonitorConfig(check_every=5, tier2_every=5, tier3_every=10)
WAITED = "called a synchronizing"


def waits(model: nn.Module, text: Text, *, monitored: bool) -> collections.Counter[str]:
    """Where the host waited for the device, and how often, in steps of two micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = Monitor(model, optimizer, out=None, config=CADENCE) if monitored else None
    batches = [text.batch(TOKENS) for _ in range(ACCUMULATED)]
    found: collections.Counter[str] = collections.Counter()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                optimizer.zero_grad()
                for batch in batches:
                    if monitor is not None:
                        monitor.batch(batch["labels"])
                    loss = model(**batch).loss / ACCUMULATED
                    loss.backward()
                if monitor is not None:
                    monitor.step(loss.detach())
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one in told:
        if WAITED in str(one.message):
            found[f"{one.filename}:{one.lineno}"] += 1
    if monitor is not None:
        monitor.close()
    return found


def main() -> None:
    given = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device))
    figures: dict[str, float] = {}
    for millions, rounds in ((30, 10), (300, 5)):
        found = measure(millions, rounds=rounds, looks=3, steps=50, rate=3e-4, device=device)
        figures |= {f"{name}_{millions}m": value for name, value in found.items()}
    model = llama(30, device)
    text = Text(model.config.vocab_size, device)
    waits(model, text, monitored=False)  # what happens but once, as memory is reserved
    without, found = (waits(model, text, monitored=monitored) for monitored in (False, True))
    figures["host_waits_a_step_without_monitor"] = without.total() / STEPS
    figures["host_waits_a_step_of_the_monitor"] = (found - without).total() / STEPS
    for place, times in (found - without).most_common():
        print(f"the host waits {times} times in {STEPS} steps at {place}")
    tell(figures)
    save(figures, given.json)


if __name__ == "__main__":
    main()
