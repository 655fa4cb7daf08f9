"""Which checkpoints are whole: those with every file that was there when they were done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from palingenesis.errors import ConfigError
from palingenesis.sft.checkpoints import MARK, Checkpoint, given, mark, newest, open_checkpoint, unmark

FACTS = {"order": {"data.dataset": "ab"}, "tokens": 12.0}


def write(folder: Path, step: int, *, marked: bool = True) -> Path:
    """A checkpoint as the trainer writes it, with a folder of shards in it."""
    made = folder / f"checkpoint-{step}"
    (made / "sharded").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"w" * 100)
    (made / "sharded" / "__0_0.distcp").write_bytes(b"s" * 50)
    (made / "trainer_state.json").write_text("{}", encoding="utf-8")
    if marked:
        mark(made, step, FACTS)
    return made


def remove(path: Path) -> None:
    path.unlink()


def test_a_whole_one(tmp_path: Path) -> None:
    made = write(tmp_path, 20)
    assert open_checkpoint(made) == Checkpoint(made, 20, FACTS)
    told = json.loads((made / MARK).read_text(encoding="utf-8"))
    assert told["files"] == {
        "model.safetensors": 100,
        str(Path("sharded") / "__0_0.distcp"): 50,
        "trainer_state.json": 2,
    }
    assert [path.name for path in made.iterdir() if path.name.startswith(MARK)] == [MARK]


def test_marking_again_lists_what_is_there_now(tmp_path: Path) -> None:
    """Also if an earlier start died between writing the mark and putting it in its place."""
    made = write(tmp_path, 20)
    (made / f"{MARK}.part").write_text("cut sho", encoding="utf-8")
    (made / "model.safetensors").write_bytes(b"longer" * 100)
    mark(made, 20, {"tokens": 3.0})
    found = open_checkpoint(made)
    assert isinstance(found, Checkpoint) and found.facts == {"tokens": 3.0}


def test_one_that_is_being_written_again_is_not_whole(tmp_path: Path) -> None:
    made = write(tmp_path, 20)
    unmark(made)
    assert newest(tmp_path) == (None, [f"{made}: {open_checkpoint(made)}"])
    unmark(made)  # nothing to take away
    unmark(tmp_path / "checkpoint-30")  # nothing there yet
    mark(made, 20, FACTS)
    assert isinstance(open_checkpoint(made), Checkpoint)


def text(content: str) -> Callable[[Path], None]:
    return lambda made: (made / MARK).write_text(content, encoding="utf-8") and None


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no mark": (lambda made: remove(made / MARK), "it was not written to its end"),
    "part of a mark": (lambda made: (made / MARK).rename(made / f"{MARK}.part"), "it has no"),
    "a file is missing": (lambda made: remove(made / "trainer_state.json"), "trainer_state.json is missing"),
    "a shard is missing": (lambda made: remove(made / "sharded" / "__0_0.distcp"), "__0_0.distcp is missing"),
    "a folder in a file's place": (
        lambda made: (remove(made / "trainer_state.json"), (made / "trainer_state.json").mkdir()),
        "trainer_state.json is missing",
    ),
    "cut short": (
        lambda made: (made / "model.safetensors").write_bytes(b"w" * 99),
        "model.safetensors has 99 bytes instead of 100",
    ),
    "too long": (
        lambda made: (made / "model.safetensors").write_bytes(b"w" * 101),
        "model.safetensors has 101 bytes instead of 100",
    ),
    "an empty mark": (text(""), "cannot be read (JSONDecodeError)"),
    "half a mark": (text('{"step": 2, "fac'), "cannot be read (JSONDecodeError)"),
    "no JSON object": (text("[1, 2]"), "cannot be read (TypeError)"),
    "something missing in it": (text('{"step": 2, "files": {}}'), "cannot be read (KeyError)"),
    "files that are a number": (text('{"step": 2, "facts": {}, "files": 3}'), "cannot be read (TypeError)"),
    "no step": (text('{"step": null, "facts": {}, "files": {}}'), "cannot be read (TypeError)"),
    "no finite step": (
        text('{"step": Infinity, "facts": {}, "files": {}}'),
        "cannot be read (OverflowError)",
    ),
    "no text at all": (lambda made: (made / MARK).write_bytes(b"\xff\xfe\x00"), "cannot be read (Unicode"),
    "a folder": (
        lambda made: (remove(made / MARK), (made / MARK).mkdir()),
        "cannot be read (IsADirectoryError)",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_one_is_passed_over_and_named(tmp_path: Path, how: str) -> None:
    older, made = write(tmp_path, 9), write(tmp_path, 20)
    spoil, reason = BROKEN[how]
    spoil(made)
    found, passed_over = newest(tmp_path)
    assert found is not None and (found.folder, found.step) == (older, 9)
    (told,) = passed_over
    assert told.startswith(f"{made}: ") and reason in told and "\n" not in told
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        given(str(made))
    assert "\n" not in str(error.value) and "auto" in str(error.value) and str(made) in str(error.value)


def test_the_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    found, passed_over = newest(tmp_path)
    assert found is not None and found.step == 100 and not passed_over


def test_all_newer_ones_that_were_cut_short_are_named_newest_first(tmp_path: Path) -> None:
    whole = write(tmp_path, 1)
    bad = [write(tmp_path, step, marked=False) for step in (3, 11, 2)]
    found, passed_over = newest(tmp_path)
    assert found is not None and found.folder == whole
    assert [told.split(":")[0] for told in passed_over] == [str(bad[1]), str(bad[0]), str(bad[2])]


@pytest.mark.parametrize(
    "name",
    ["checkpoint-", "checkpoint-best", "checkpoint-²", "checkpoint--3", "checkpoint-1.5", "checkpoints-9"],
)
def test_foreign_folders_are_not_looked_at(tmp_path: Path, name: str) -> None:
    write(tmp_path, 7)
    (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").write_text("a file", encoding="utf-8")
    found, passed_over = newest(tmp_path)
    assert found is not None and found.step == 7 and passed_over == []


def test_there_may_be_none(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "nowhere") == (None, [])


def test_one_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write(tmp_path, 20)
    assert given(str(made)) == Checkpoint(made, 20, FACTS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert given("~/checkpoint-20").folder == made


@pytest.mark.parametrize("name", ["nowhere", "file", "x" * 300])
def test_one_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="there is no folder") as error:
        given(str(tmp_path / name))
    assert "\n" not in str(error.value) and name in str(error.value)
