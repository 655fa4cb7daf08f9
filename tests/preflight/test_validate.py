"""``pgs validate`` on rows: what is counted, in one process or several, and what cannot be checked at all."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.cases.build import rows, save_model, sentence, write_rows
from tests.preflight.conftest import MODEL, conversation

from palingenesis.errors import ConfigError
from palingenesis.findings.render import to_json
from palingenesis.preflight.checks.setup import ModelFacts
from palingenesis.preflight.samples import Reader, batches, rows_of, sources_of
from palingenesis.preflight.tally import NAMED, Tally
from palingenesis.preflight.target import target_of, tokenizer_of
from palingenesis.preflight.validate import validate
from palingenesis.preflight.validate_facts import print_facts
from palingenesis.preflight.validate_findings import Judge, copies
from palingenesis.preflight.validate_rules import ODD
from palingenesis.sft.config.load import option_names
from palingenesis.sft.config.whole import TrainConfig
from palingenesis.sft.stream import mask_options

OK = conversation("Hi", "Hello.")


def checked(path: Path, *options: tuple[str, str], **how: Any) -> Any:
    return validate(target_of(None, options, MODEL, str(path)), **how)


def test_healthy_rows_make_no_finding_and_many_facts(write: Callable[..., Path]) -> None:
    report = checked(write(*rows(20, turns=2)))
    assert report.findings == () and report.code == 0
    facts = report.facts["train"]
    assert facts["rows"] == facts["used"] == facts["samples"] == 20
    assert facts["loss_share"]["p0"] <= facts["loss_share"]["p50"] <= facts["loss_share"]["p100"] < 1
    assert [turn["answers"] for turn in facts["loss_tokens_by_turn"]] == [20, 20]
    assert facts["scripts"] == {"Latin": 20}
    assert facts["batches"]["packing"]["packed_rows"] < 20
    json.dumps(to_json(report), allow_nan=False)


def test_the_counts_are_those_of_the_samples(write: Callable[..., Path]) -> None:
    path = write(*rows(15))
    config = target_of(None, (), MODEL, str(path))
    reader = Reader(tokenizer_of(config), mask_options(config))
    found: list[Any] = []
    for source, row in rows_of(sources_of(config, "train"), None):
        found += reader.read(source, row)  # type: ignore[arg-type]
    facts = checked(path).facts["train"]
    assert facts["tokens"] == sum(len(sample.encoded.input_ids) for sample in found)
    assert facts["loss_tokens"] == sum(sample.encoded.loss_tokens for sample in found)


def test_padding_is_that_of_the_batches(write: Callable[..., Path]) -> None:
    made = rows(20)
    for row in made[::4]:
        row["messages"][1]["content"] += " word" * 30
    path = write(*made)
    config = target_of(None, [("train.per_device_batch_size", "4")], MODEL, str(path))
    reader = Reader(tokenizer_of(config), mask_options(config))
    found: list[Any] = []
    for source, row in rows_of(sources_of(config, "train"), None):
        found += reader.read(source, row)  # type: ignore[arg-type]
    cells = sum(batch.tensors["input_ids"].numel() for batch in batches(found, config, reader.tokenizer))
    tokens = sum(len(sample.encoded.input_ids) for sample in found)
    batch_facts = validate(config).facts["train"]["batches"]
    assert batch_facts["padding_share_checked"] == pytest.approx(1 - tokens / cells)
    assert 0 < batch_facts["padding_share"] < 1


def broken_rows(count: int) -> list[Any]:
    made: list[Any] = [*rows(count), *rows(5)]
    made[3] = "{"
    made[count // 2]["messages"][1]["content"] = " "
    made[count - 2]["messages"][0]["content"] = "Voilà l’été".encode().decode("cp1252")
    return made


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", broken_rows(700))
    seen: list[int] = []
    alone = checked(path, num_samples=None, processes=1)
    several = checked(path, num_samples=None, processes=2, progress=seen.append)
    assert len(seen) == 3 and sum(seen) == 705
    assert to_json(several) == to_json(alone)
    assert {finding.check for finding in alone.findings} == {
        "data.broken_json",
        "data.empty_answer",
        "data.mojibake",
        "data.duplicates",
    }


def test_lines_are_named_and_only_so_many(write: Callable[..., Path]) -> None:
    made: list[Any] = rows(60)
    for at in range(40):
        made[at] = "{"
    (finding,) = (f for f in checked(write(*made)).findings if f.check == "data.broken_json")
    assert finding.evidence["lines"] == list(range(1, NAMED + 1))
    assert finding.evidence["count"] == 40
    assert "line 1: not JSON" in finding.message


def test_lines_of_several_sources_go_by_source(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [*rows(10), "{"])
    two = write_rows(tmp_path / "two.jsonl", ["{", *rows(10, first=50)])
    sources = f"[{{dataset: '{one}'}}, {{dataset: '{two}', weight: 2}}]"
    config = target_of(None, [("data.dataset", "null"), ("data.sources", sources)], MODEL, "unused")
    report = validate(config, num_samples=None)
    (finding,) = report.findings
    assert finding.evidence["lines"] == {"one": [11], "two": [1]}
    assert report.facts["train"]["by_source"]["two"]["samples"] == 10


def test_how_many_rows(write: Callable[..., Path]) -> None:
    path = write(*rows(30))
    assert checked(path, num_samples=7).facts["train"]["rows"] == 7
    assert checked(path, num_samples=None).facts["train"]["rows"] == 30
    with pytest.raises(ConfigError, match="at least 1"):
        checked(path, num_samples=0)


def test_evaluation_data_is_checked_too(tmp_path: Path, write: Callable[..., Path]) -> None:
    held_out = write_rows(tmp_path / "held.jsonl", [*rows(6, first=90), "{"])
    options = (("data.eval_dataset", str(held_out)),)
    report = checked(write(*rows(20)), *options)
    (finding,) = report.findings
    assert finding.check == "data.broken_json" and finding.evidence["split"] == "eval"
    assert report.facts["eval"]["samples"] == 6
    few = checked(write(*rows(20)), *options, ("data.eval_samples", "3"))
    assert few.facts["eval"]["rows"] == 3 and few.findings == ()


def test_plain_text_has_no_answers_to_lose(write: Callable[..., Path]) -> None:
    path = write(*({"text": sentence(number, 20)} for number in range(12)))
    sources = f"[{{dataset: '{path}', mode: pretrain}}]"
    config = target_of(None, [("data.dataset", "null"), ("data.sources", sources)], MODEL, "unused")
    report = validate(config)
    assert report.findings == ()
    assert report.facts["setup"]["end_of_turn"] is None


def test_packing_is_tried_out_and_checked(write: Callable[..., Path]) -> None:
    options = (("data.packing", "true"), ("data.max_seq_length", "128"))
    report = checked(write(*rows(30)), *options)
    assert report.findings == ()
    assert report.facts["train"]["batches"]["padding_share_checked"] == 0


def test_a_model_that_cannot_be_built_proves_nothing(write: Callable[..., Path]) -> None:
    options = (
        ("data.packing", "true"),
        ("data.max_seq_length", "128"),
        ("model.attn_implementation", "no_such_attention"),
    )
    report = checked(write(*rows(12)), *options)
    assert [finding.check for finding in report.findings] == ["data.packing_unproven"]
    assert report.code == 0


def test_every_fix_names_an_option_that_exists(tmp_path: Path) -> None:
    from tests.cases.test_cases import CASES, run

    names = set(option_names(TrainConfig))
    chosen = [name for name in CASES if name in ("broken_json", "answers_cut", "duplicates", "empty_answer")]
    assert len(chosen) == 4
    for name in chosen:
        report, _ = run(name, tmp_path / name, healthy=False)
        for finding in report.findings:
            assert any(option in finding.fix for option in names), finding


def test_every_rule_names_an_option_that_exists() -> None:
    from palingenesis.preflight.validate_rules import COLLATOR, RULES

    names = set(option_names(TrainConfig))
    for rule in RULES:
        assert rule.fix == COLLATOR or any(option in rule.fix for option in names), rule


@pytest.mark.parametrize("count", [10, 200, 300, 10_000])
@pytest.mark.parametrize(("odd", "share"), [(ODD.text, 0.005), (ODD.cut, 0.01), (ODD.copies, 0.02)])
def test_one_odd_row_is_told_and_several_are_a_warning(count: int, odd: float, share: float) -> None:
    """The rule by its numbers: one row never, two or more from a share on."""
    enough = max(2, math.ceil(Fraction(str(share)) * count))
    assert ODD.severity(1, count, odd) == "info"
    assert ODD.severity(enough, count, odd) == "warning"
    assert ODD.severity(enough - 1, count, odd) == "info"


@pytest.mark.parametrize("count", [10, 200, 300, 10_000])
def test_one_odd_row_whatever_the_number_of_rows(count: int) -> None:
    config = target_of(None, (), MODEL, "unused")
    tally = Tally()
    tally.rows["rows"] = count
    for check in ("data.mojibake", "data.control_characters", "data.broken_json", "masking.header_trained"):
        tally.note(check, "rows", 3)
    tally.note_cut("rows", 3, 100)
    tally.source.extend([tally.index_of("rows")] * count)
    for name, values in (("line", range(count)), ("content", [0, *range(count - 1)])):
        getattr(tally, name).extend(values)
    for name in ("length", "whole", "loss"):
        getattr(tally, name).extend([50] * count)
    found = {f.check: f.severity for f in Judge(config, tally, "train", ModelFacts()).findings()}
    assert found == {
        "data.mojibake": "info",
        "data.control_characters": "info",
        "data.answers_cut": "info",
        "data.duplicates": "info",
        "data.broken_json": "warning",
        "masking.header_trained": "critical",
    }


def test_one_odd_row_of_ten_and_of_three_hundred(write: Callable[..., Path]) -> None:
    for count in (10, 300):
        made = rows(count)
        made[4]["messages"][0]["content"] += "Voilà l’été".encode().decode("cp1252")
        report = checked(write(*made, name=f"{count}.jsonl"), num_samples=None)
        (finding,) = report.findings
        assert (finding.check, finding.severity, report.code) == ("data.mojibake", "info", 0)
    for at in (7, 9):
        made[at]["messages"][0]["content"] += "Voilà l’été".encode().decode("cp1252")
    report = checked(write(*made, name="three.jsonl"), num_samples=None)
    assert [(f.check, f.severity) for f in report.findings] == [("data.mojibake", "warning")]


def test_one_row_is_one(write: Callable[..., Path]) -> None:
    out = io.StringIO()
    print_facts(checked(write(OK)), Console(file=out, width=200))
    assert "training: 1 of 1 row used, 1 sample, " in out.getvalue()


# -- what cannot be checked --------------------------------------------------------------------------------

_LINE = json.dumps(OK) + "\n"
UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "missing": ("", b"", "there is no file or folder"),
    "empty": ("rows.jsonl", b"", "holds no row"),
    "blank": ("rows.jsonl", b"\n \n", "holds no row"),
    "no json": ("rows.jsonl", b"one\ntwo\n", "none of the 2 rows .* line 1: not JSON"),
    "wrong field": (
        "rows.jsonl",
        _LINE.replace("messages", "dialog").encode(),
        "it has dialog; set data.messages",
    ),
    "utf-16": ("rows.jsonl", _LINE.encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
    "utf-16 without a mark": ("rows.jsonl", _LINE.encode("utf-16-le"), "is UTF-16 text: save it as UTF-8"),
    "utf-32": ("rows.jsonl", _LINE.encode("utf-32"), "is UTF-32 text: save it as UTF-8"),
    "gzip": ("rows.jsonl.gz", gzip.compress(_LINE.encode()), "is compressed with gzip: unpack it"),
    "gzip by another name": ("rows.jsonl", gzip.compress(_LINE.encode()), "is compressed with gzip"),
    "csv": ("rows.csv", b"a,b\n", "does not end in .jsonl"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_one_line_for_what_cannot_be_read(name: str, tmp_path: Path) -> None:
    file, held, told = UNREADABLE[name]
    path = tmp_path / (file or "nothing.jsonl")
    if file:
        path.write_bytes(held)
    with pytest.raises(ConfigError, match=told) as error:
        checked(path)
    assert "\n" not in str(error.value)


def test_a_directory_without_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="holds no file that ends in"):
        checked(tmp_path / "data")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + _LINE.encode())
    assert checked(path).findings == ()


def test_a_broken_line_is_named_and_the_rest_checked(write: Callable[..., Path]) -> None:
    report = checked(write(OK, '{"messages": [', conversation("Ho", "Hello!")))
    (finding,) = report.findings
    assert finding.check == "data.broken_json" and finding.evidence["lines"] == [2]
    assert report.facts["train"]["used"] == 2


def test_a_file_is_read_only_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for row in rows(40):
            file.write(json.dumps(row) + "\n")
        file.truncate(200 * 1024 * 1024)  # a hole: reading on would be seen as one line of 200 MB
    import tracemalloc

    tracemalloc.start()
    report = checked(path, num_samples=20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.findings == ()
    assert peak < 100 * 1024 * 1024


# -- parts -------------------------------------------------------------------------------------------------


def test_copies_come_in_groups() -> None:
    import numpy as np

    hashes = np.array([5, 1, 5, 2, 1, 1], dtype=np.uint64)
    assert copies(hashes) == [[0, 2], [1, 4, 5]]
    assert copies(np.array([1, 2], dtype=np.uint64)) == []


def test_tallies_join_as_if_counted_at_once() -> None:
    one, two = Tally(), Tally()
    for tally, source, lines in ((one, "a", (1, 2)), (two, "b", (1,)), (two, "a", (3,))):
        for line in lines:
            tally.rows[source] += 1
            tally.source.append(tally.index_of(source))
            tally.line.append(line)
            tally.note("data.x", source, line, f"{source}{line}")
            tally.count_turn(line % 2, 10)
    one.join(two)
    assert one.rows == {"a": 3, "b": 1}
    assert [(one.sources[index], line) for index, line in zip(one.source, one.line, strict=True)] == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("a", 3),
    ]
    assert one.seen["data.x"].places == [("a", 1), ("a", 2), ("b", 1), ("a", 3)]
    assert one.seen["data.x"].example == "a1"
    assert one.by_turn == [(1, 10), (3, 30)]


def test_what_the_length_takes_is_told_with_the_length_that_is_needed(
    write: Callable[..., Path],
) -> None:
    """Also where a row loses all of its answer, and is left out; what is told to be set helps."""
    made = rows(20)
    made[3]["messages"][0]["content"] += " word" * 200
    made[7]["messages"][1]["content"] += " word" * 100
    path = write(*made)
    report = checked(path, ("data.max_seq_length", "64"))
    (cut,) = (finding for finding in report.findings if finding.check == "data.answers_cut")
    assert cut.evidence["count"] == 2 and cut.evidence["lost_all"] == 1
    assert sorted(cut.evidence["lines"]) == [4, 8]
    assert cut.evidence["longest"] > 200
    (none,) = (finding for finding in report.findings if finding.check == "masking.no_loss_tokens")
    assert none.fix == cut.fix == f"set data.max_seq_length to {cut.evidence['longest']}"
    assert checked(path, ("data.max_seq_length", str(cut.evidence["longest"]))).findings == ()


def test_a_message_without_text_is_no_missing_field(write: Callable[..., Path]) -> None:
    made = [
        *rows(20),
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
    ]
    checks = [finding.check for finding in checked(write(*made)).findings]
    assert checks == ["data.bad_value"]


def test_what_a_collator_of_ones_own_does_is_mended_there(write: Callable[..., Path]) -> None:

    def all_of_it(batch: Any) -> dict[str, Any]:
        ids = [torch.tensor(row["input_ids"]) for row in batch]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=0)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        return {"input_ids": padded, "attention_mask": real, "labels": padded.masked_fill(real == 0, -100)}

    report = checked(write(*rows(20)), collate=all_of_it)
    assert "masking.all_loss" in [finding.check for finding in report.findings]
    masking = [finding for finding in report.findings if finding.check.startswith("masking.")]
    assert masking and all("mend the collator" in finding.fix for finding in masking)


@pytest.mark.parametrize("pads", [True, False])
def test_everything_trained_but_what_pads_is_named_by_both_faults(pads: bool, tmp_path: Path) -> None:
    """What the collator of transformers for plain text makes of conversations."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = save_model(tmp_path / "model", pad="<|im_end|>" if pads else "<|pad|>")
    plain = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def collate(batch: Any) -> Any:
        return plain([{"input_ids": [int(token) for token in row["input_ids"]]} for row in batch])

    path = write_rows(tmp_path / "rows.jsonl", rows(6))
    config = target_of(None, [("train.per_device_batch_size", "2")], str(tmp_path / "model"), str(path))
    found = {f.check: f for f in validate(config, collate=collate).findings}
    assert found["masking.all_loss"].evidence["count"] == 6
    if not pads:
        assert set(found) == {"masking.all_loss"}
        return
    assert set(found) == {"masking.all_loss", "masking.end_of_turn_untrained"}
    untrained = found["masking.end_of_turn_untrained"]
    assert untrained.evidence["pad_is_end_of_turn"] is True
    assert "every '<|im_end|>' is masked" in untrained.message and "also pads" in untrained.fix


def test_the_collator_of_another_library_is_taken_as_it_is(tmp_path: Path) -> None:
    """That of transformers for plain text fails on rows that have labels."""
    from transformers import DataCollatorForLanguageModeling

    plain = DataCollatorForLanguageModeling(save_model(tmp_path / "model", pad="<|im_end|>"), mlm=False)
    path = write_rows(tmp_path / "rows.jsonl", rows(6))
    config = target_of(None, [("train.per_device_batch_size", "3")], str(tmp_path / "model"), str(path))
    found = {finding.check for finding in validate(config, collate=plain).findings}
    assert found == {"masking.all_loss", "masking.end_of_turn_untrained"}


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned nothing"),
        ({"input_ids": torch.zeros(2, 3)}, r"returned \(2, 3\) and \(\)"),
        ({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 2)}, r"returned \(2, 3\) and \(2, 2\)"),
        (ZeroDivisionError("by zero"), r"fails \(ZeroDivisionError: by zero\): it is called with"),
    ],
)
def test_a_collator_that_makes_no_batch_is_refused(
    returned: Any, told: str, write: Callable[..., Path]
) -> None:
    def collate(batch: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(ConfigError, match=told):
        checked(write(*rows(2)), collate=collate)


def test_the_fix_for_a_collator_that_was_given_is_to_mend_it(write: Callable[..., Path]) -> None:
    def without_loss(batch: Any) -> dict[str, Any]:
        ids = [torch.tensor(row["input_ids"]) for row in batch]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {"input_ids": padded, "labels": torch.full_like(padded, -100)}

    (finding,) = checked(write(*rows(20)), collate=without_loss).findings
    assert finding.check == "masking.no_loss_tokens" and "mend the collator" in finding.fix


def test_evaluation_data_that_cannot_be_read_is_named_by_its_option(write: Callable[..., Path]) -> None:
    for given, told in (
        ("missing.jsonl", "there is no file"),
        (str(write(name="none.jsonl")), "holds no row"),
    ):
        with pytest.raises(ConfigError, match=rf"^data\.eval_dataset: .*{told}"):
            checked(write(*rows(4)), ("data.eval_dataset", given))
