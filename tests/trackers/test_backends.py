"""The real libraries: what was logged is read back from what they left on disk."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.fakes import recorded, row
from tests.trackers.readers import BACKENDS, Backend, Cells, from_trackio, identity

from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.record.format import STEP_KEY
from palingenesis.trackers import NAMES, close_all, make_tracker, start
from palingenesis.trackers.choose import require
from palingenesis.trackers.wandb import has_key
from palingenesis.trackers.wandb_file import held_offline, offline_files, read_rows

CONFIG = {"train": {"learning_rate": 2e-5}, "name": "x"}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no server, no home but the test's own."""
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")) and name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # trackio reads its folder when it is imported.
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "run"


every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def steps(cells: Cells) -> list[int]:
    return sorted(step for step, key, _ in cells if key == "train/loss")


def train(backend: Backend, run: Path, first: int, last: int, **options: Any) -> None:
    """Steps of a run; resumed where ``resumed_from`` says so."""
    again = "resumed_from" in options
    writer = recorded(run, 0, resume=again, overwrite=not again)
    group = start([backend.name], run, project="proj", name="a run", config=CONFIG, **options)
    for step in range(first, last + 1):
        writer.metrics(row(step))
        for worker in group:
            worker.log(step, row(step))
    writer.close({})
    assert close_all(group)


# ------------------------------------------------------------------------------------------------- the tests


@every_backend
def test_rows_are_read_back_as_they_were_logged(
    backend: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(backend.name)
    run = folder_of(tmp_path)
    writer = recorded(run, 0)
    (worker,) = start([backend.name], run, project="proj", name="a run", config=CONFIG)
    odd = {"health/a-layer/model.layers.0": 1e-30, "eval/loss": -2.5, "nan": math.nan, "inf": math.inf}
    worker.log(1, {"train/global_step": 1, "train/loss": 0.125})
    worker.log(2, {"train/global_step": 2, **odd})
    assert worker.close()
    writer.close({})

    cells = backend.read(run)

    assert sorted((step, key) for step, key, _ in cells) == sorted(
        [(1, "train/loss"), *((2, key) for key in odd)]
    )
    expected = {"train/loss": 0.125, **odd}
    for _, key, value in cells:
        assert value == pytest.approx(expected[key], rel=1e-6, nan_ok=True), key
    assert capfd.readouterr().out == ""  # `--json` on stdout stays JSON


@every_backend
def test_a_resumed_run_goes_on_and_no_step_appears_twice(backend: Backend, tmp_path: Path) -> None:
    """Run to 12, resumed from the checkpoint of step 8, run to 20."""
    pytest.importorskip(backend.name)
    run = folder_of(tmp_path)
    train(backend, run, 1, 12)
    before = identity(run)
    train(backend, run, 9, 20, resumed_from=8)

    assert identity(run) == before
    assert steps(backend.read(run)) == list(range(1, 21))


@every_backend
def test_a_fresh_start_in_the_same_folder_is_another_run(backend: Backend, tmp_path: Path) -> None:
    pytest.importorskip(backend.name)
    run = folder_of(tmp_path)
    train(backend, run, 1, 5)
    before = identity(run)
    earlier = backend.read(run)
    train(backend, run, 1, 3)

    assert identity(run)["run_id"] != before["run_id"]
    assert steps(backend.read(run)) == [1, 2, 3]
    (run / "tracker_run_id.json").write_text(json.dumps(before))
    assert backend.read(run) == earlier


KILLED = """
import os, sys, time
from pathlib import Path
from palingenesis.trackers import start
from tests.trackers.fakes import recorded, row
backend, run = sys.argv[1], Path(sys.argv[2])
writer = recorded(run, 0)
(worker,) = start([backend], run, project="proj", name="a run")
for step in range(1, 31):
    writer.metrics(row(step))
    worker.log(step, row(step))
writer.flush()
while worker._delivery.sent < 20:
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@every_backend
def test_a_run_killed_and_resumed_has_every_step_once(backend: Backend, tmp_path: Path) -> None:
    """wandb has lost what it had not flushed, the others nothing; the record has it all."""
    pytest.importorskip(backend.name)
    run = folder_of(tmp_path)
    run.mkdir()
    # wandb's own process is not to be shared: it dies with the run.
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    environment |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, backend.name, str(run)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9, done.stderr
    train(backend, run, 26, 40, resumed_from=25)

    assert steps(backend.read(run)) == list(range(1, 41))


def test_wandb_has_train_global_step_as_its_x_axis(tmp_path: Path) -> None:
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    run = folder_of(tmp_path)
    train(BACKENDS[0], run, 1, 2)
    from palingenesis.trackers.wandb_file import whole_records

    (path,) = offline_files(run / "wandb", identity(run)["run_id"])
    found = [record.FromString(data) for data in whole_records(path.read_bytes())]
    metrics = [each.metric for each in found if each.WhichOneof("record_type") == "metric"]

    assert [(each.name, each.glob_name, each.step_metric) for each in metrics] == [
        (STEP_KEY, "", ""),
        ("", "*", STEP_KEY),
    ]
    (start_record,) = [each.run for each in found if each.WhichOneof("record_type") == "run"]
    assert (start_record.run_id, start_record.project, start_record.display_name) == (
        identity(run)["run_id"],
        "proj",
        "a run",
    )
    assert [each["_timestamp"] for each in read_rows(path)] == [1001.0, 1002.0]


OUTAGE = """
import sys, time
from pathlib import Path
import palingenesis.trackers.wandb as ours
from palingenesis.trackers import Limits, close_all, start
from tests.trackers.fakes import recorded, row
ours._INIT_WITHIN = 3.0
run = Path(sys.argv[1])
writer = recorded(run, 0)
workers = start(["wandb"], run, limits=Limits(open=0.1))
for step in range(1, 11):
    writer.metrics(row(step))
    workers[0].log(step, row(step))
writer.close({})
print(close_all(workers, timeout=0.5))
"""


def test_a_process_ends_though_the_server_of_wandb_is_away(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    done = subprocess.run(
        [sys.executable, "-c", OUTAGE, str(folder_of(tmp_path))],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout == "False\n"
    assert "sends what is missing" in done.stderr


def test_wandb_files_are_read_as_wandb_writes_them(tmp_path: Path) -> None:
    """Logged without us; one row longer than the file's blocks, and the file torn anywhere."""
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True)
    run = wandb.init(project="p", id="mine", dir=str(tmp_path), settings=settings)
    long = {f"layer.{index}": float(index) for index in range(3000)}
    rows = [{"a": 1.5, STEP_KEY: 1}, {**long, STEP_KEY: 2}, {"a/b": 2.5, STEP_KEY: 3}]
    for each in rows:
        run.log(each)
    run.finish()

    (path,) = offline_files(tmp_path / "wandb", "mine")
    # `finish` returns a moment before the file is whole.
    until = time.monotonic() + 10
    while len(list(read_rows(path))) < len(rows) and time.monotonic() < until:
        time.sleep(0.05)
    assert path.stat().st_size > 3 * 32768
    bare = [{k: v for k, v in each.items() if not k.startswith("_")} for each in read_rows(path)]
    assert bare == rows
    held, count = held_offline(tmp_path / "wandb", "mine")
    assert count == 3 and (held["a"], held["a/b"], held["layer.7"]) == (1, 3, 2)

    data = path.read_bytes()
    for size in [0, 3, 7, 10, *range(20, len(data), 4999)]:
        path.write_bytes(data[:size])
        assert len(list(read_rows(path))) <= 3


@pytest.mark.parametrize(
    ("environment", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "k" * 40}, None, True),
        ({}, "machine api.wandb.ai login user password abc", True),
        ({}, "machine example.org login user password abc", False),
        ({"WANDB_BASE_URL": "https://w.example.org:8080"}, "machine w.example.org login u password p", True),
        ({}, "not a netrc file", False),
    ],
)
def test_wandb_is_online_only_where_a_key_is(
    environment: dict[str, str],
    netrc: str | None,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
        (tmp_path / ".netrc").chmod(0o600)

    assert has_key() is expected


def test_a_trackio_file_that_cannot_be_written_is_noticed_and_caught_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A locked database: trackio's own sender would drop these rows."""
    pytest.importorskip("trackio")
    run = folder_of(tmp_path)
    train(BACKENDS[1], run, 1, 3)
    blocker = sqlite3.connect(tmp_path / "trackio" / "proj.db", isolation_level=None)
    writer = recorded(run, 0, resume=True)
    (worker,) = start(["trackio"], run, resumed_from=3)
    blocker.execute("PRAGMA locking_mode = EXCLUSIVE")
    blocker.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.WARNING):
        for step in range(4, 9):
            writer.metrics(row(step))
            worker.log(step, row(step))
        writer.flush()
        blocker.execute("ROLLBACK")
        blocker.close()
        assert worker.close(timeout=60)
    writer.close({})

    assert steps(from_trackio(run)) == list(range(1, 9))


def test_configurations_are_shown(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    for name in ("trackio", "tensorboard", "mlflow"):
        pytest.importorskip(name)
    writer = recorded(run, 0)
    group = start(["trackio", "tensorboard", "mlflow"], run, project="proj", config=CONFIG)
    for worker in group:
        worker.log(1, {"train/loss": 1.0})
    assert close_all(group)
    writer.close({})

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b'"learning_rate": 2e-05' in text.tensor_proto.string_val[0]
    (param,) = run.glob("mlruns/*/*/params/train.learning_rate")
    assert param.read_text() == "2e-05"
    with sqlite3.connect(tmp_path / "trackio" / "proj.db") as database:
        ((found,),) = database.execute("SELECT config FROM configs")
    assert json.loads(found)["train"] == CONFIG["train"]


def test_an_unknown_tracker_and_a_missing_library_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="expected one of wandb, trackio, tensorboard, mlflow"):
        make_tracker("comet", tmp_path, "p")
    for name in NAMES:
        for module in [each for each in sys.modules if each.split(".")[0] == name]:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=r"palingenesis\[trackers\]"):
            make_tracker(name, tmp_path, "p")


def test_trackers_whose_libraries_are_there_can_be_required() -> None:
    require([])
    require(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_without_its_library_is_told_before_anything_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(each for each in NAMES if each != name)
    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MissingExtraError, match=r"palingenesis\[trackers\]") as error:
        require(NAMES)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_trackers_import_neither_torch_nor_a_backend() -> None:
    program = (
        "import sys, pkgutil, importlib, palingenesis.trackers as trackers\n"
        "for found in pkgutil.iter_modules(trackers.__path__):\n"
        "    importlib.import_module(f'palingenesis.trackers.{found.name}')\n"
        "bad = {'torch', 'transformers', 'wandb', 'trackio', 'tensorboard', 'mlflow'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
