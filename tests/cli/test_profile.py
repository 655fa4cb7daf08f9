"""``pgs profile``: what it prints, its JSON, its exit codes, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.preflight.memory.made import llama

from palingenesis.cli import main

SHORT = ("--data.max_seq_length", "128", "--model.torch_dtype", "float32")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    llama().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_model_that_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", folder, "--gpu_memory_gb", "8", "--search_seconds", "0", *SHORT]) == 0
    shown = capsys.readouterr().out
    for words in ("parameters", "optimizer states", "loss peak", "CUDA context", "headroom", "fits"):
        assert words in shown
    assert "memory.fits" in shown
    assert shown.isascii()


def test_one_document_and_nothing_else(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpu-memory-gb", "0.1", "--search-seconds", "4", "--json"]
    assert main(["profile", "--model", folder, *SHORT, *arguments]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    facts = found["facts"]
    assert found["findings"][0]["check"] == "memory.does_not_fit"
    assert sum(facts["categories"].values()) == facts["peak_bytes"]
    assert facts["total_bytes"] == facts["peak_bytes"] + sum(part["bytes"] for part in facts["margin"])
    assert facts["fits"] is False


def test_what_time_did_not_allow_is_said(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["profile", "--model", folder, "--gpu_memory_gb", "0.2", *SHORT]
    assert main([*small, "--search_seconds", "0.000001"]) == 1
    told = capsys.readouterr().out
    assert "not tried, because --search_seconds was up: " in told and "--train.optimizer adamw_8bit" in told
    assert main([*small, "--search_seconds", "0"]) == 1
    assert "not tried" not in capsys.readouterr().out


def test_without_a_card_there_is_no_verdict(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", folder, *SHORT]) == 0
    assert "give --gpu_memory_gb or --gpu" in capsys.readouterr().out


def test_the_model_made_on_the_spot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("chatterbot_corpus")
    file = tmp_path / "run.yaml"
    file.write_text("model: {name_or_path: demo:tiny-chat}\ndata: {dataset: demo:chatterbot}\n")
    options = ["--config", str(file), "--gpu", "t4-16gb", "--search_seconds", "0", *SHORT]
    assert main(["profile", *options]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --config FILE, or --model DIR"),
        (("--model", "/nowhere/at/all"), "no model folder"),
        (("--gpu", "a100-80gb", "--gpu_memory_gb", "80"), "both given"),
        (("--model", "DIR", "--gpu", "abacus"), "no card 'abacus'"),
        (("--model", "DIR", "--gpu_memory_gb", "inf"), "--gpu-memory-gb"),
        (("--model", "DIR", "--gpu_memory_gb", "nan"), "--gpu-memory-gb"),
        (("--model", "DIR", "--parallel.strategy", "fsdp2"), "--world_size"),
        (("--model", "DIR", "--train.optimiser", "sgd"), "did you mean --train.optimizer"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], told: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(folder if one == "DIR" else one for one in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert printed.err.count("\n") == 1
