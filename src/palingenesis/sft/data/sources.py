"""Where rows come from: files of JSON or Parquet, folders of them, data sets by name, ours or the hub's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.sft.builtin import PREFIX, builtin_rows, is_builtin
from palingenesis.sft.data.array import begins_array, entries
from palingenesis.sft.data.rows import BadRow, Row
from palingenesis.sft.hub import data_from_cache_alone, hub_answers, hub_name

if TYPE_CHECKING:
    import datasets  # type: ignore[import-untyped]

SUFFIXES = (".jsonl", ".json", ".parquet")
#: Words at the start of a file's name, or of the name of its folder, that say which split it holds.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_LONGEST_RAW = 2000
#: How files begin that are no text as it is, and what to do with them.
_NO_TEXT = {
    b"\x1f\x8b": "is compressed with gzip: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it with unzstd",
    # Before UTF-16, whose mark it begins with.
    **dict.fromkeys((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "is UTF-32 text: save it as UTF-8"),
    **dict.fromkeys(
        (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{", b"[\x00", b"\x00["),
        "is UTF-16 text: save it as UTF-8",
    ),
}


@dataclass(frozen=True)
class Source:
    """One source of rows.

    Attributes:
        dataset: a file (``.jsonl``, ``.json``, ``.parquet``), a folder of such files, a hub name, or a name
            of ``sft/builtin.py``.
        split: the split of a hub data set; in a folder whose files are named by split, the files to take.
        mode: ``"sft"`` for conversations, ``"pretrain"`` for plain text.
        messages_field: the field that holds the messages (or the text); ``None`` looks for the usual ones.
        weight: how often this source is drawn from when there are several, against the others' weights.
        name: what it is called in messages and metrics.
    """

    dataset: str
    split: str = "train"
    mode: Literal["sft", "pretrain"] = "sft"
    messages_field: str | None = None
    weight: float = 1.0
    name: str = ""

    @property
    def title(self) -> str:
        """The name, or what can be made of the path or hub name."""
        if not self.name and is_builtin(self.dataset):
            return self.dataset.removeprefix(PREFIX)
        return self.name or (Path(self.dataset).stem if _looks_local(self.dataset) else self.dataset)


def load_rows(source: Source) -> Iterator[Row]:
    """Every row of ``source`` in the order of the file; a line that is no JSON comes as a row with a problem.

    Raises:
        ConfigError: there is nothing to read under that name.
    """
    if is_builtin(source.dataset):
        return _rows_of_dataset(source, builtin_rows(source.dataset, source.split))
    path = Path(source.dataset).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return _rows_of_dataset(source, _saved(path))
        return _rows_of_folder(source, path)
    if path.is_file():
        return _rows_of_file(source, path)
    if _looks_local(source.dataset):
        raise ConfigError(f"data.dataset: there is no file or folder {source.dataset!r}")
    return _rows_of_dataset(source, _from_hub(source))


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or Path(name).suffix in SUFFIXES or Path(name).exists()


def _rows_of_folder(source: Source, folder: Path) -> Iterator[Row]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise ConfigError(
            f"data.dataset: the folder {source.dataset!r} holds no file that ends in {', '.join(SUFFIXES)}"
        )
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    if any(splits.values()):
        wanted = next((split for split, words in _SPLITS.items() if source.split in words), source.split)
        files = [path for path in files if splits[path] == wanted]
        if not files:
            there = ", ".join(sorted({split for split in splits.values() if split}))
            raise ConfigError(
                f"data.dataset_split: the files in {source.dataset!r} are named by split and none is "
                f"{source.split!r}; there is {there}"
            )
    return (row for path in files for row in _rows_of_file(source, path))


def _split_of(path: Path) -> str | None:
    """The split that the name of a file, or of the outermost folder it is in, begins with."""
    for part in (path.parts[0], path.name):
        word = "".join(letter if letter.isalpha() else " " for letter in part.lower()).split()
        for split, words in _SPLITS.items():
            if word and word[0] in words:
                return split
    return None


def _rows_of_file(source: Source, path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            begins = file.read(4)
        if wrong := next((told for mark, told in _NO_TEXT.items() if begins.startswith(mark)), None):
            raise ConfigError(f"data.dataset: {path} {wrong}")
        if path.suffix == ".parquet":
            return _rows_of_dataset(source, _parquet(path), str(path))
        if path.suffix in (".jsonl", ".json"):
            # Some name an array .jsonl, and some put an object a line into a .json: the content tells.
            return _rows_of_array(source, path) if begins_array(path) else _rows_of_lines(source, path)
    except OSError as error:
        raise ConfigError(f"data.dataset: {path} cannot be read: {error.strerror or error}") from None
    raise ConfigError(f"data.dataset: {path} does not end in {', '.join(SUFFIXES)}")


def _rows_of_lines(source: Source, path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield _row_of_line(source, path, number, line)


def _row_of_line(source: Source, path: Path, number: int, line: bytes) -> Row:
    raw = line.decode("utf-8", errors="replace").strip()[:_LONGEST_RAW]
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = BadRow("broken_json", f"not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8")
    except json.JSONDecodeError as error:
        problem = BadRow("broken_json", f"not JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError as error:
        problem = BadRow("broken_json", f"not JSON: {error}")
    else:
        return _row(source, path, number, value, raw)
    return Row(source.title, str(path), number, None, problem, raw)


def _rows_of_array(source: Source, path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, value in enumerate(entries(path), start=1):
            yield _row(source, path, number, value, "")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.dataset: {path} is not UTF-8 after entry {number}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"data.dataset: {path} is not JSON: {told}") from None


def _row(source: Source, path: Path, number: int, value: object, raw: str) -> Row:
    if isinstance(value, Mapping):
        return Row(source.title, str(path), number, value)
    problem = BadRow("bad_value", f"the row is {_named(value)}; an object is needed")
    return Row(source.title, str(path), number, None, problem, raw or json.dumps(value)[:_LONGEST_RAW])


def _named(value: object) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", dict: "an object", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _rows_of_dataset(source: Source, dataset: Iterable[Any], file: str = "") -> Iterator[Row]:
    for number, value in enumerate(dataset, start=1):
        yield Row(source.title, file or source.dataset, number, value)


def _parquet(path: Path) -> Iterable[Any]:
    arrow, parquet = _require("pyarrow"), _require("pyarrow.parquet")
    try:
        opened = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ConfigError(
            f"data.dataset: {path} is no Parquet file: {' '.join(str(error).split())}"
        ) from None
    return (row for batch in opened.iter_batches(batch_size=1000) for row in batch.to_pylist())


def _saved(path: Path) -> datasets.Dataset:
    """A folder that ``Dataset.save_to_disk`` wrote."""
    loaded: datasets.Dataset = _require("datasets").load_from_disk(str(path))
    return loaded


def _from_hub(source: Source) -> Iterable[Any]:
    library = _require("datasets")
    asked = hub_answers()
    try:
        with nullcontext() if asked else data_from_cache_alone():
            loaded: Iterable[Any] = library.load_dataset(source.dataset, split=source.split)
    except Exception as error:  # noqa: BLE001 - the hub's client raises dozens of kinds, all told in one line
        told = " ".join(str(error).split()) or type(error).__name__
        if not asked:
            told = f"the hub ({hub_name()}) does not answer, and it is not in the local cache"
        raise ConfigError(
            f"data.dataset: {source.dataset!r} (split {source.split!r}) is no local path and could not be "
            f"loaded by that name: {told}"
        ) from None
    return loaded


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this data set is read with {module!r}, which cannot be imported ({error}): "
            "pip install 'palingenesis[sft]'"
        ) from error
