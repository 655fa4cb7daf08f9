"""A run that goes on: the record and the baselines continue, by checkpoint or from the record alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.monitor.scripted import Scripted

from palingenesis import Monitor, load_run
from palingenesis.errors import ConfigError, RecordExistsError


def bands(run: Scripted) -> np.ndarray:
    return np.array(run.monitor._judging.watchers.layers.band())


def test_resume_continues_the_record_and_the_baselines(tmp_path: Path) -> None:
    whole = Scripted()
    whole.steps(40, loss=2.0)
    first = Scripted(out=tmp_path / "run")
    first.steps(20, loss=2.0)
    first.monitor.close()
    second = Scripted(out=tmp_path / "run", resume=True)
    second.random.set_state(first.random.get_state())
    second.steps(20, loss=2.0)
    np.testing.assert_allclose(bands(second), bands(whole), rtol=1e-5)  # norms are recorded to 7 digits
    second.steps(2, b=1e4, loss=30.0)
    assert [(alarm.layer, alarm.step) for alarm in second.alarms] == [("b", 42)]
    assert second.events("loss_spike")  # no second warm-up
    second.monitor.close()
    found = load_run(tmp_path / "run")
    assert found.verify().ok
    assert found.metrics["step"].tolist() == list(range(1, 43))
    assert [(event.event, event.from_step) for event in found.events if event.event == "run_resumed"] == [
        ("run_resumed", 20)
    ]
    assert found.info["resumed_from"] == [20]


def test_a_checkpoint_carries_step_and_baselines(tmp_path: Path) -> None:
    first = Scripted(out=tmp_path / "run")
    first.steps(25)
    torch.save(first.monitor.state_dict(), tmp_path / "state.pt")
    json.dumps(first.monitor.state_dict())  # plain numbers and lists
    first.steps(7, b=math_nan())
    del first  # killed: the record has no end
    second = Scripted(out=tmp_path / "run2")
    second.monitor.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.monitor.global_step == 25
    second.steps(2, c=0.0)
    assert [(alarm.layer, alarm.step) for alarm in second.alarms] == [("c", 27)]


def math_nan() -> float:
    return float("nan")


def test_steps_run_again_replace_those_after_the_checkpoint(tmp_path: Path) -> None:
    first = Scripted(out=tmp_path / "run")
    first.steps(25, loss=2.0)
    state = first.monitor.state_dict()
    first.steps(7, b=float("nan"), loss=9.0)
    first.monitor._journal.writer._lock.release()  # as if the process had died
    second = Scripted(out=tmp_path / "run", resume=True)
    second.monitor.load_state_dict(state)
    second.steps(10, loss=2.0)
    assert second.monitor.verdict == "HEALTHY"  # what was run again does not count
    second.monitor.close()
    found = load_run(tmp_path / "run")
    assert found.metrics["step"].tolist() == list(range(1, 36))
    assert set(found.metrics["train/loss"].tolist()) == {2.0}
    assert found.verdict == "HEALTHY"


def test_the_verdict_of_a_resumed_run_remembers_what_was_before(tmp_path: Path) -> None:
    first = Scripted(out=tmp_path / "run")
    first.steps(20)
    first.steps(2, b=0.0)
    first.steps(2)
    first.monitor.close()
    second = Scripted(out=tmp_path / "run", resume=True)
    second.steps(20)
    assert second.monitor.verdict == "WARNING"
    assert not second.alarms


def test_a_state_that_is_none_is_refused_and_changes_nothing() -> None:
    run = Scripted()
    run.steps(20)
    before = bands(run)
    for bad in ({}, {"step": 3, "watchers": {"layers": {}}}):
        with pytest.raises(ConfigError, match="no state of a monitor"):
            run.monitor.load_state_dict(bad)
    assert run.monitor.global_step == 20
    np.testing.assert_array_equal(bands(run), before)


def test_a_second_run_into_the_same_folder_is_refused_or_replaces_it(tmp_path: Path) -> None:
    first = Scripted(out=tmp_path / "run")
    first.steps(3)
    first.monitor.close()
    with pytest.raises(RecordExistsError, match=r"resume=True.*overwrite=True"):
        Scripted(out=tmp_path / "run")
    second = Scripted(out=tmp_path / "run", overwrite=True)
    second.steps(2)
    second.monitor.close()
    assert load_run(tmp_path / "run").metrics["step"].tolist() == [1, 2]


KILLED = """
import os, signal, sys, torch
from tests.monitor.scripted import Scripted
run = Scripted(out=sys.argv[1])
run.steps(30, loss=1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_what_was_written_and_is_not_healthy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode != 0
    found = load_run(tmp_path / "run")
    assert found.verdict == "INTERRUPTED"
    assert found.metrics["step"].tolist() == list(range(1, 31))
    again = Scripted(out=tmp_path / "run", resume=True)
    again.steps(5)
    again.monitor.close()
    assert load_run(tmp_path / "run").verdict == "HEALTHY"


def test_start_step_numbers_the_steps_of_a_run_that_begins_late() -> None:
    run = Scripted(start_step=700)
    run.step()
    assert run.monitor.global_step == 701


def test_two_monitors_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    first = Scripted(out=tmp_path / "run")
    first.step()
    with pytest.raises(Exception, match="another"):
        Monitor(first.model, out=tmp_path / "run", resume=True)
