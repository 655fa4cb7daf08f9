"""The order of a run's samples, and what it is made of."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sft.data.chats import FAMILIES

from palingenesis.errors import ConfigError
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import MaskOptions, Quarantine, Source, collator, mix, prepare
from palingenesis.sft.objectives import samples_of
from palingenesis.sft.stream import (
    FINGERPRINT_BITS,
    Stream,
    evaluation_sets,
    evaluation_sources,
    fingerprint,
    fingerprinting,
    training_sources,
    training_stream,
)

TOKENIZER = FAMILIES["chatml"].tokenizer()


def write(path: Path, rows: list[Any]) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, "utf-8")
    return str(path)


def chats(path: Path, count: int, word: str = "Yes") -> str:
    return write(
        path,
        [
            {"prompt": f"{word} number {number}?", "completion": f"{word}. " * (1 + number % 4)}
            for number in range(count)
        ],
    )


def configured(data: dict[str, Any], bad: float = 100.0, **train: Any) -> TrainConfig:
    train = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 7, **train}
    return TrainConfig(
        model={"name_or_path": "demo:tiny-chat"},
        data={"max_seq_length": 128, **data},
        train=train,
        preprocess={"max_bad_rows_pct": bad},
    )


def streamed(config: TrainConfig, world_size: int = 1, folder: Path | None = None) -> Stream:
    with Quarantine(folder) as quarantine:
        return training_stream(config, TOKENIZER, quarantine, world_size=world_size)


def ids(dataset: Any) -> list[list[int]]:
    return [list(row) for row in dataset["input_ids"][:]]


def parts_of(*sources: Source) -> list[Any]:
    options = MaskOptions(max_length=128)
    return [prepare(source, TOKENIZER, Quarantine(None), options=options) for source in sources]


def test_the_order_is_that_of_one_mixture_after_the_other(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 23)
    stream = streamed(configured({"dataset": path}, epochs=3))
    parts = parts_of(Source(path))
    expected = [row for epoch in range(3) for row in ids(mix(parts, [1.0], seed=7, epoch=epoch))]

    assert ids(stream.dataset) == expected[:68]
    assert expected[:23] != expected[23:46] and sorted(expected[:23]) == sorted(expected[23:46])
    assert stream.left_out == 1 and stream.steps == 17 and stream.steps_per_epoch == 23 / 4
    assert set(stream.dataset.column_names) == {"input_ids", "labels", "source"}
    assert stream.sources == ("a",) and stream.accounts[0].used == 23


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    entries = [
        {"dataset": chats(tmp_path / "a.jsonl", 30), "weight": 1},
        {"dataset": chats(tmp_path / "b.jsonl", 10, "No"), "weight": 3, "name": "noes"},
        {"dataset": write(tmp_path / "t.jsonl", [{"text": "Some text."}] * 8), "mode": "pretrain"},
    ]
    config = configured({"sources": entries}, epochs=2)
    stream = streamed(config)
    sources = training_sources(config)
    parts = parts_of(*sources)
    expected = [mix(parts, [1.0, 3.0, 1.0], seed=7, epoch=epoch) for epoch in range(2)]

    assert ids(stream.dataset) == [row for epoch in expected for row in ids(epoch)]
    assert Counter(stream.dataset["source"][:48]) == Counter(expected[0]["source"][:])
    assert Counter(stream.dataset["source"][:48])["noes"] == 29
    assert stream.sources == ("a", "noes", "t")
    assert [account.source for account in stream.accounts] == ["a", "noes", "t"]


def test_the_end_is_cut_to_batches_of_all_processes(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 23)
    for world_size, kept, steps in ((1, 22, 6), (2, 20, 3), (5, 20, 1)):
        stream = streamed(configured({"dataset": path}), world_size)
        assert (len(stream.dataset), stream.left_out, stream.steps) == (kept, 23 - kept, steps)
    with pytest.raises(ConfigError, match=r"23 rows in all, and one batch takes 24 .* on 12 processes"):
        streamed(configured({"dataset": path}), 12)


@pytest.mark.parametrize("packing", [False, True])
def test_max_steps_are_as_many_steps_whatever_the_epochs(packing: bool, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 23)
    data = {"dataset": path, "packing": packing}
    stream = streamed(configured(data, max_steps=9, epochs=1), 2)
    assert (stream.steps, len(stream.dataset), stream.left_out) == (9, 9 * 8, 0)
    # A shorter run is the beginning of a longer one.
    longer = streamed(configured(data, max_steps=12), 2)
    assert ids(longer.dataset)[: 9 * 8] == ids(stream.dataset)
    assert streamed(configured(data, max_steps=1, epochs=50)).steps == 1


@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_only_has_to_skip(packing: bool, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 40)
    config = configured({"dataset": path, "packing": packing}, epochs=3)
    whole, again = streamed(config), streamed(config)
    assert ids(whole.dataset) == ids(again.dataset)
    rest = again.dataset.select(range(8, len(again.dataset)))
    assert ids(rest) == ids(whole.dataset)[8:]
    assert rest["labels"][:] == whole.dataset["labels"][8:]


def test_packed_rows_hold_every_sample_once_an_epoch(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 60)
    config = configured(
        {"dataset": path, "packing": True}, epochs=2, per_device_batch_size=1, gradient_accumulation_steps=3
    )
    stream = streamed(config)
    assert set(stream.dataset.column_names) == {"input_ids", "labels", "seq_lengths"}
    assert stream.left_out == 0 and stream.steps_per_epoch == len(stream.dataset) / 2 / 3
    documents: Counter[tuple[int, ...]] = Counter()
    for row in stream.dataset:
        edges = np.cumsum([0, *row["seq_lengths"]])
        documents.update(tuple(row["input_ids"][a:b]) for a, b in pairwise(edges))
        assert edges[-1] == len(row["input_ids"]) <= 128
    (part,) = parts_of(Source(path))
    assert documents == {tuple(row): 2 for row in ids(part.dataset)}
    # Rows of few long samples do not all come first.
    counts = [len(lengths) for lengths in stream.dataset["seq_lengths"][: len(stream.dataset) // 2]]
    assert counts != sorted(counts)


def test_packing_keeps_samples_apart_for_the_objectives(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 30)
    config = configured({"dataset": path, "packing": True})
    rows = list(streamed(config).dataset.select(range(2)))
    batch = collator(0, packed=True)(rows)
    lengths = [length for row in rows for length in row["seq_lengths"]]
    assert len(lengths) > 2
    expected = np.repeat(np.arange(len(lengths)), lengths)
    assert samples_of(batch["position_ids"])[0].tolist() == expected.tolist()


def test_a_packed_batch_and_its_parts_have_one_fingerprint(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 40)
    stream = streamed(configured({"dataset": path, "packing": True}))
    rows = [stream.dataset[number] for number in range(4)]
    collate = pickle.loads(pickle.dumps(fingerprinting(collator(0, packed=True))))
    whole = collate(rows)["fingerprint"]
    assert whole.shape == (1,) and str(whole.dtype) == "torch.int64"
    halves = [int(collate(part)["fingerprint"]) for part in (rows[2:], rows[:2])]
    assert sum(halves) % 2**FINGERPRINT_BITS == int(whole) == fingerprint(rows)
    assert 0 <= int(whole) < 2**48
    assert {"input_ids", "labels", "position_ids"} <= collate(rows).keys()


def test_a_fingerprint_is_of_ids_and_labels() -> None:
    row = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    others = [
        {"input_ids": [1, 2, 4], "labels": [-100, 2, 3]},
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [1, 3, 2], "labels": [-100, 2, 3]},
    ]
    assert len({fingerprint([each]) for each in [row, *others]}) == 4
    assert fingerprint([row, row]) == 2 * fingerprint([row]) % 2**48
    # The same on every machine and in every version: runs are compared by it.
    bytes_of = struct.pack("<6i", *row["input_ids"], *row["labels"])
    assert fingerprint([row]) == int.from_bytes(hashlib.blake2b(bytes_of, digest_size=6).digest(), "little")


def test_evaluation_sets_by_title(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        {"dataset": chats(tmp_path / "a.jsonl", 9), "name": "yes"},
        {"dataset": "demo:chatterbot-eval"},
    ]
    config = configured({"dataset": "demo:chatterbot", "eval_sources": entries, "eval_samples": 5})
    caplog.set_level(logging.INFO, "palingenesis")
    found = evaluation_sets(config, TOKENIZER, Quarantine(None))
    assert list(found) == ["yes", "chatterbot-eval"]
    assert all(len(each) == 5 and each.column_names == ["input_ids", "labels"] for each in found.values())
    assert ids(found["yes"]) == ids(parts_of(Source(entries[0]["dataset"]))[0].dataset)[:5]
    assert [record.message.split(":")[0] for record in caplog.records] == ["yes", "chatterbot-eval"]


def test_one_evaluation_set_or_none(tmp_path: Path) -> None:
    long = "word " * 300
    rows = [{"prompt": "One?", "completion": "Two."}, {"prompt": long, "completion": "Cut off."}, "{"]
    path = write(tmp_path / "held.jsonl", rows)
    config = configured({"dataset": path, "eval_dataset": path})
    with Quarantine(tmp_path / "out") as quarantine:
        found = evaluation_sets(config, TOKENIZER, quarantine)
    assert {title: len(each) for title, each in found.items()} == {"held": 1}
    assert quarantine.counts == {("held", "nothing_to_train"): 1, ("held", "broken_json"): 1}
    assert evaluation_sources(config)[0].split == "validation"
    assert evaluation_sets(configured({"dataset": path}), TOKENIZER, Quarantine(None)) == {}
    none = write(tmp_path / "none.jsonl", rows[1:])
    with pytest.raises(ConfigError, match=r"none of the 2 rows of .*none\.jsonl' can be used"):
        evaluation_sets(configured({"dataset": path, "eval_dataset": none}), TOKENIZER, Quarantine(None))


def test_too_many_bad_rows_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*[{"prompt": "a", "completion": "b"}] * 6, "{", {"none": 1}])
    assert len(streamed(configured({"dataset": path}, bad=25)).dataset) == 6
    with pytest.raises(ConfigError) as caught:
        streamed(configured({"dataset": path}, bad=24.9), folder=tmp_path / "out")
    told = str(caught.value)
    assert told.startswith(
        "rows: 2 of 8 rows (25%) cannot be used, and preprocess.max_bad_rows_pct allows 24.9"
    )
    assert told.endswith(f"all are in {tmp_path / 'out' / 'skipped_rows.jsonl'}") and "\n" not in told
    assert len((tmp_path / "out" / "skipped_rows.jsonl").read_text().splitlines()) == 2


def test_what_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "palingenesis")
    streamed(configured({"dataset": chats(tmp_path / "a.jsonl", 5)}))
    told = [record.message for record in caplog.records]
    assert told[0].startswith("a: 5 of 5 rows used, 5 samples")
    assert told[1:] == ["1 of 5 rows are left out at the end: they do not fill a batch on every process"]


def test_a_long_run_over_little_data_is_light(tmp_path: Path) -> None:
    config = configured({"dataset": chats(tmp_path / "a.jsonl", 8)}, max_steps=20_000)
    stream = streamed(config)
    assert len(stream.dataset) == 80_000 and stream.dataset.data.nbytes < 100_000
