"""What the callbacks share: missing packages, ranks that stop together, listeners that come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

from palingenesis.integrations._hooks import Listener, listen
from palingenesis.integrations._shared import Session

WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import importlib
from palingenesis.errors import MissingExtraError
for name in ("transformers", "lightning"):
    try:
        importlib.import_module(f"palingenesis.integrations.{name}")
    except MissingExtraError as error:
        print(error)
"""


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "palingenesis.integrations.transformers needs transformers: pip install 'palingenesis[sft]'",
        "palingenesis.integrations.lightning needs lightning: pip install 'palingenesis[lightning]'",
    ]


STEPS = 12


def _train_on_one_rank(rank: int, folder: str) -> None:
    """Rank 1 alone sees a loss that is not a number at step 5."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(
        model,
        optimizer,
        f"{folder}/run",
        {"check_every": 3},
        stop_on="critical",
        scaler=None,
        gradients="raw",
        start_step=0,
    )
    stopped = 0
    for step in range(1, STEPS + 1):
        model(torch.ones(1, 2)).sum().backward()
        session.add_loss(float("nan") if (rank, step) == (1, 5) else 1.0)
        session.step()
        optimizer.step()
        optimizer.zero_grad()
        if session.should_stop():
            stopped = step
            break
    session.end()
    Path(folder, f"stopped-{rank}").write_text(str(stopped))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this build of torch has no torch.distributed"
)
def test_ranks_stop_together_when_one_has_a_reason(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_on_one_rank, args=(str(tmp_path),), nprocs=2)
    # Step 5 is judged at the check of step 6, and the ranks agree one step after a check.
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["7", "7"]


class Owner:
    def add(self, a: int, b: int = 1) -> int:
        """Adds."""
        return a + b


def test_listeners_come_and_go_in_any_order_and_leave_nothing() -> None:
    owner = Owner()
    heard: list[Any] = []
    first = listen(owner, "add", Listener(before=lambda args, kwargs: heard.append((args, kwargs))))
    second = listen(owner, "add", Listener(after=heard.append))
    assert owner.add(2, b=3) == 5
    assert heard == [((2,), {"b": 3}), 5]
    assert owner.add.__doc__ == "Adds."
    first()
    assert owner.add(1) == 2
    assert heard[2:] == [2]
    second()
    second()
    assert vars(owner) == {}


def test_what_a_method_raises_is_told_and_passed_on() -> None:
    owner = Owner()
    heard: list[BaseException] = []
    undo = listen(owner, "add", Listener(failed=heard.append))
    with pytest.raises(TypeError) as caught:
        owner.add("1")  # type: ignore[arg-type]
    assert heard == [caught.value]
    undo()


def test_what_was_put_on_the_instance_before_or_after_stays() -> None:
    owner = Owner()
    mine = owner.add
    owner.add = mine  # type: ignore[method-assign]
    undo = listen(owner, "add", Listener())
    undo()
    assert owner.add is mine
    undo = listen(owner, "add", Listener())
    hooked = owner.add
    owner.add = lambda a, b=1: 10 * hooked(a, b)  # type: ignore[method-assign]
    undo()
    assert owner.add(1) == 20
