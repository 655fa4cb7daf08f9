"""The first weights on disk: kept, read again, and refused with a reason where they cannot be had."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig, load_run
from palingenesis.layers import find_layers
from palingenesis.signals.drift import Drift
from palingenesis.signals.packet import Packet
from palingenesis.tiers.start import keep_start, read_start, start_file

MODES = ["sketch", "exact"]


def net(width: int = 200) -> nn.Module:
    """One matrix that is sketched, and small tensors that are kept whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8))


def kept(folder: Path, mode: Any, model: nn.Module) -> Path:
    drift = Drift(find_layers(model), mode)
    drift.begin()
    file = start_file(folder, 0)
    keep_start(drift, file)
    return file


def drifts(drift: Drift) -> dict[str, float]:
    return dict(drift.decode(Packet(drift.compute()).arrays()).layers["health/weight_drift"])


def test_where_it_is(tmp_path: Path) -> None:
    assert start_file(tmp_path, 0) == tmp_path / "start.pt"
    assert start_file(tmp_path, 3) == tmp_path / "start-3.pt"


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_goes_on_drifts_from_its_first_weights(mode: Any, tmp_path: Path) -> None:
    model = net()
    first = [p.detach().clone() for p in model.parameters()]
    file = kept(tmp_path, mode, model)
    assert [one.name for one in tmp_path.iterdir()] == ["start.pt"]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    drift = Drift(find_layers(model), mode)
    assert read_start(drift, file) is None
    drift.begin()  # what is known stays
    found = drifts(drift)
    for i in range(2):
        (w0, b0), layer = first[2 * i : 2 * i + 2], model[i]  # type: ignore[index]
        before = torch.cat([w0.flatten(), b0]).double()
        now = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]).double()
        exact = float((now - before).norm() / before.norm())
        assert found[str(i)] == pytest.approx(exact, rel=0.1 if mode == "sketch" else 1e-5)


def test_a_resumed_run_that_keeps_its_start_again_loses_nothing(tmp_path: Path) -> None:
    model = net()
    file = kept(tmp_path, "sketch", model)
    drift = Drift(find_layers(model), "sketch")
    assert read_start(drift, file) is None
    again = tmp_path / "again.pt"
    keep_start(drift, again)
    one, other = (torch.load(path, weights_only=True) for path in (file, again))
    assert one["start"].keys() == other["start"].keys() and one["width"] == other["width"]
    for label, start in one["start"].items():
        assert torch.equal(start["kept"], other["start"][label]["kept"])
        assert start["square"] == other["start"][label]["square"]


@pytest.mark.parametrize("mode", MODES)
def test_it_is_as_large_as_what_is_kept(mode: Any, tmp_path: Path) -> None:
    model = net(600)
    model_bytes = sum(p.nbytes for p in model.parameters())
    size = kept(tmp_path, mode, model).stat().st_size
    assert size < (0.01 * model_bytes + 70_000 if mode == "sketch" else model_bytes + 10_000)


def test_an_older_start_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "start.pt").write_bytes(b"old")
    model = net()
    file = kept(tmp_path, "sketch", model)
    drift = Drift(find_layers(model), "sketch")
    assert read_start(drift, file) is None
    assert drifts(drift) == {"0": 0.0, "1": 0.0}


def test_a_start_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    file = kept(tmp_path, "sketch", net())
    before = file.read_bytes()
    file.with_suffix(".tmp").mkdir()  # where it would be written first
    with pytest.raises((OSError, RuntimeError)):
        kept(tmp_path, "sketch", net())
    assert file.read_bytes() == before


# -- why not -----------------------------------------------------------------------------------------------


def refused(file: Path, mode: Any = "sketch", model: nn.Module | None = None) -> str:
    reason = read_start(Drift(find_layers(model or net()), mode), file)
    assert reason is not None
    assert "\n" not in reason
    return reason


def test_none_was_kept(tmp_path: Path) -> None:
    assert "does not hold the weights" in refused(tmp_path / "start.pt")


@pytest.mark.parametrize(("before", "now"), [MODES, MODES[::-1]])
def test_another_way_of_drift(before: Any, now: Any, tmp_path: Path) -> None:
    reason = refused(kept(tmp_path, before, net()), now)
    assert f"drift={now!r}" in reason and f"drift={before!r}" in reason


def test_sketches_of_another_version(tmp_path: Path) -> None:
    file = kept(tmp_path, "sketch", net())
    state = torch.load(file, weights_only=True)
    torch.save({**state, "signs": "00ff"}, file)
    assert "another version" in refused(file)


def pickled(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


DAMAGE = {
    "empty": b"",
    "no archive": b"to be or not to be",
    "zeros": bytes(4096),
    "a list": pickled([1, 2]),
    "a tensor": pickled(torch.zeros(3)),
    "none": pickled(None),
    "a model": pickled(nn.Linear(2, 2)),
    "without keys": pickled({}),
    "without starts": pickled({"mode": "sketch", "width": 7, "signs": "?"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_none(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "start.pt"
    file.write_bytes(DAMAGE[damage])
    reason = refused(file)
    assert "start.pt in the record cannot be read" in reason or "another version" in reason


def damaged(state: dict[str, Any], **changes: Any) -> bytes:
    return pickled({**state, **changes})


def test_a_state_with_something_else_in_it(tmp_path: Path) -> None:
    file = kept(tmp_path, "sketch", net())
    state = torch.load(file, weights_only=True)
    (label, one), *_ = state["start"].items()
    for changes in (
        {"start": []},
        {"start": None},
        {"width": None},
        {"width": "wide"},
        {"start": {label: None}},
        {"start": {label: {**one, "square": "?"}}},
        {"start": {label: {**one, "extent": [1]}}},
        {"start": {label: {k: v for k, v in one.items() if k != "kept"}}},
    ):
        file.write_bytes(damaged(state, **changes))
        assert "cannot be read" in refused(file), changes


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_was_cut_off_or_changed(mode: Any, tmp_path: Path) -> None:
    """Whatever has happened to it: a reason, or a start that is whole."""
    model = net(32)
    file = kept(tmp_path, mode, model)
    whole = file.read_bytes()
    source = random.Random(0)
    for trial in range(60):
        if trial % 2:
            cut = source.randrange(len(whole))
            file.write_bytes(whole[:cut])
        else:
            at = source.randrange(len(whole))
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << source.randrange(8))]) + whole[at + 1 :])
        drift = Drift(find_layers(model), mode)
        reason = read_start(drift, file)
        if trial % 2:
            assert reason is not None
        if reason is None:
            assert drifts(drift) == {"0": 0.0, "1": 0.0}


def test_a_code_that_would_run_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    file = tmp_path / "start.pt"
    file.write_bytes(pickled({"mode": Bomb()}))
    assert "cannot be read" in refused(file)
    assert not ran.exists()


# -- in a run ----------------------------------------------------------------------------------------------


def run(folder: Path, steps: int, **given: Any) -> Monitor:
    torch.manual_seed(0)
    model = nn.Linear(12, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, folder, config=MonitorConfig(tier3_every=2, check_every=2), **given)
    for _ in range(steps):
        model(torch.randn(4, 12)).square().mean().backward()
        monitor.step(1.0)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return monitor


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_run_whose_start_is_damaged_goes_on_without_drift(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4)
    file = start_file(folder, 0)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:500])
    else:
        file.unlink()
    before = file.read_bytes() if file.exists() else None
    again = run(folder, 4, resume=True)
    (event,) = [
        e for e in again.events if e.event == "signal_unavailable" and e.signal == "health/weight_drift"
    ]
    assert ("start.pt" if damage == "cut" else "first started") in event.reason
    assert not [e for e in again.events if e.event == "monitor_error"]
    found = load_run(folder)
    steps = found.metrics["step"][~np.isnan(found.metrics["health/weight_drift_max"])]
    assert steps.tolist() == [1, 2, 4]  # of the run before
    # It is not taken for a start that a later run could go on from.
    assert (file.read_bytes() if file.exists() else None) == before
