"""Where a run begins, and what keeps it from beginning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.sft.test_checkpoints import FACTS, write

from palingenesis.errors import ConfigError
from palingenesis.sft.checkpoints import Checkpoint, mark
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.resume import Start, order_of_data, require_same_order, where_to_start


def config(**changes: Any) -> TrainConfig:
    made: dict[str, Any] = {"model": {"name_or_path": "m"}, "data": {"dataset": "d"}, "train": {}}
    for name, value in changes.items():
        section, option = name.split("__")
        made.setdefault(section, {})[option] = value
    return TrainConfig(**made)


def start(folder: Path, resume_from: str | None = None) -> Start:
    return where_to_start(config(train__output_dir=str(folder), train__resume_from=resume_from))


def recorded(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}", encoding="utf-8")
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


# -- where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume_from", [None, "auto"])
def test_a_new_folder(tmp_path: Path, resume_from: str | None) -> None:
    found = start(tmp_path / "a" / "run", resume_from)
    assert found == Start(None, goes_on=False, passed_over=[])
    assert (found.step, found.facts) == (0, {})
    assert tree(tmp_path) == []  # nothing was made


@pytest.mark.parametrize("resume_from", [None, "auto"])
def test_a_folder_with_other_things_in_it(tmp_path: Path, resume_from: str | None) -> None:
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert start(tmp_path, resume_from) == Start(None, goes_on=False, passed_over=[])


def test_auto_goes_on_from_the_newest_whole_one(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    whole, half = write(run, 10), write(run, 20, marked=False)
    before = tree(tmp_path)
    found = start(run, "auto")
    assert found.checkpoint == Checkpoint(whole, 10, FACTS) and found.goes_on
    assert (found.step, found.facts) == (10, FACTS)
    assert len(found.passed_over) == 1 and str(half) in found.passed_over[0]
    assert tree(tmp_path) == before


def test_auto_without_any_whole_one_begins_again_in_the_same_record(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    write(run, 20, marked=False)
    found = start(run, "auto")
    assert (found.checkpoint, found.goes_on, found.step, len(found.passed_over)) == (None, True, 0, 1)


def test_a_checkpoint_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run")
    older = write(run, 10)
    write(run, 20)
    found = start(run, str(older))
    assert found.goes_on and found.step == 10
    # However the two are spelled.
    os.symlink(run, tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    assert start(Path("link"), "run/../run/checkpoint-10").step == 10


def test_a_checkpoint_of_another_run_begins_a_record_in_a_new_folder(tmp_path: Path) -> None:
    other = write(recorded(tmp_path / "other"), 10)
    found = start(tmp_path / "new", str(other))
    assert found.step == 10 and not found.goes_on


# -- where not ---------------------------------------------------------------------------------------------


def one_line(folder: Path, resume_from: str | None, *expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        start(folder, resume_from)
    told = str(error.value)
    assert "\n" not in told
    for part in expected:
        assert part in told, told


@pytest.mark.parametrize("kind", ["record", "checkpoint", "half a checkpoint"])
def test_a_folder_that_holds_a_run_is_not_begun_in(tmp_path: Path, kind: str) -> None:
    if kind == "record":
        recorded(tmp_path)
    else:
        write(tmp_path, 10, marked=kind == "checkpoint")
    one_line(tmp_path, None, "train.output_dir", str(tmp_path), "train.resume_from", "auto")


@pytest.mark.parametrize("resume_from", [None, "auto"])
@pytest.mark.parametrize("below", ["", "run", "a/b/run"])
def test_a_file_is_no_folder(tmp_path: Path, resume_from: str | None, below: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    one_line(tmp_path / "file" / below, resume_from, "train.output_dir", str(tmp_path / "file"), "is a file")


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/run"], ids=["long", "home"])
@pytest.mark.parametrize("resume_from", [None, "auto"])
def test_a_folder_that_cannot_be(name: str, resume_from: str | None) -> None:
    one_line(Path(name), resume_from, "train.output_dir", name, "cannot be used")


def test_no_such_checkpoint(tmp_path: Path) -> None:
    one_line(tmp_path, str(tmp_path / "checkpoint-3"), "train.resume_from", "checkpoint-3", "auto")


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    half = write(tmp_path, 10, marked=False)
    one_line(tmp_path, str(half), "train.resume_from", str(half), "auto")


@pytest.mark.parametrize("kind", ["record", "checkpoints"])
def test_a_checkpoint_of_another_run_does_not_go_into_a_folder_that_has_one(
    tmp_path: Path, kind: str
) -> None:
    other = write(recorded(tmp_path / "other"), 10)
    if kind == "record":
        recorded(tmp_path / "run")
    else:
        write(tmp_path / "run", 5)
    one_line(tmp_path / "run", str(other), "train.output_dir", str(tmp_path / "run"), str(other))


# -- the order of samples ----------------------------------------------------------------------------------

SOURCES = [{"dataset": "a", "name": "a"}, {"dataset": "b", "name": "b"}]

CHANGES: dict[str, dict[str, Any]] = {
    "data.dataset": {"data__dataset": "other"},
    "data.dataset_split": {"data__dataset_split": "test"},
    "data.messages_field": {"data__messages_field": "chat"},
    "data.max_seq_length": {"data__max_seq_length": 100},
    "data.packing": {"data__packing": True},
    "data.last_turn_only": {"data__last_turn_only": True},
    "data.train_on_reasoning": {"data__train_on_reasoning": False},
    "data.include_observations": {"data__include_observations": True},
    "data.sources": {"data__dataset": None, "data__sources": SOURCES},
    "train.seed": {"train__seed": 43},
    "model.chat_template": {"model__chat_template": "x.jinja"},
    "train.per_device_batch_size × gradient_accumulation_steps × processes": {
        "train__per_device_batch_size": 2
    },
}


@pytest.mark.parametrize("option", CHANGES)
def test_what_changes_the_order(option: str) -> None:
    before, after = order_of_data(config(), 2), order_of_data(config(**CHANGES[option]), 2)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {option} | ({"data.dataset"} if option == "data.sources" else set())


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"dataset": "c"}, {"mode": "pretrain"}])
def test_a_source_changes_the_order(change: dict[str, Any]) -> None:
    before = order_of_data(config(data__dataset=None, data__sources=SOURCES), 1)
    changed = [SOURCES[0], SOURCES[1] | change]
    after = order_of_data(config(data__dataset=None, data__sources=changed), 1)
    assert {name for name in before if before[name] != after[name]} == {"data.sources"}


def test_the_order_of_sources_changes_the_order() -> None:
    before = order_of_data(config(data__dataset=None, data__sources=SOURCES), 1)
    assert before != order_of_data(config(data__dataset=None, data__sources=SOURCES[::-1]), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"data__num_workers": 2},
        {"data__eval_dataset": "e"},
        {"data__eval_sources": SOURCES},
        {"data__eval_dataset": "e", "data__eval_every": 7, "data__eval_samples": 3, "data__eval_split": "t"},
        {"train__max_steps": 500},
        {"train__epochs": 3},
        {"train__learning_rate": 1.0},
        {"train__save_steps": 3},
        {"train__output_dir": "elsewhere"},
        {"train__resume_from": "auto"},
        {"memory__loss_num_chunks": 2},
        {"plugins__dft": True},
        {"logging__run_name": "x"},
    ],
    ids=str,
)
def test_what_does_not_change_the_order(change: dict[str, Any]) -> None:
    assert order_of_data(config(**change), 1) == order_of_data(config(), 1)


def test_a_window_is_a_window_however_it_is_cut() -> None:
    """Samples of a step are the same; only who sees them is another."""
    cuts = [(1, 8, 2), (2, 4, 2), (4, 4, 1), (16, 1, 1), (1, 1, 16)]
    orders = [
        order_of_data(
            config(train__per_device_batch_size=batch, train__gradient_accumulation_steps=steps), ranks
        )
        for batch, steps, ranks in cuts
    ]
    assert all(one == orders[0] for one in orders)


def from_checkpoint(tmp_path: Path, order: dict[str, str] | None) -> Start:
    made = write(tmp_path, 10, marked=False)
    mark(made, 10, {} if order is None else {"order": order})
    return start(tmp_path, str(made))


@pytest.mark.parametrize("option", CHANGES)
def test_another_order_is_refused_by_name(tmp_path: Path, option: str) -> None:
    begun = from_checkpoint(tmp_path, order_of_data(config(), 2))
    require_same_order(begun, order_of_data(config(train__max_steps=9), 2))
    with pytest.raises(ConfigError) as error:
        require_same_order(begun, order_of_data(config(**CHANGES[option]), 2))
    told = str(error.value)
    assert "\n" not in told and "train.resume_from" in told and str(tmp_path / "checkpoint-10") in told
    assert option in told or (option == "data.sources" and "data.dataset" in told)


def test_an_option_that_the_checkpoint_does_not_know_is_refused(tmp_path: Path) -> None:
    order = order_of_data(config(), 1)
    begun = from_checkpoint(tmp_path, {name: one for name, one in order.items() if name != "data.packing"})
    with pytest.raises(ConfigError, match=r"data\.packing"):
        require_same_order(begun, order)


def test_without_an_order_to_compare_there_is_nothing_to_refuse(tmp_path: Path) -> None:
    order = order_of_data(config(), 1)
    require_same_order(Start(None, goes_on=False, passed_over=[]), order)
    require_same_order(from_checkpoint(tmp_path, None), order)
