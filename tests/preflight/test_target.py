"""What a command looks at: exactly one way to say it, and one line for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cases.build import save_model

from palingenesis.errors import ConfigError
from palingenesis.preflight.target import target_of, tokenizer_of

MODEL, DATA = "demo:tiny-chat", "demo:chatterbot"


def test_a_configuration_with_options_put_over_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name_or_path: '{MODEL}'}}\ndata: {{dataset: '{DATA}'}}\n")
    config = target_of(path, [("data.max_seq_length", "64")])
    assert config.model.name_or_path == MODEL
    assert config.data.max_seq_length == 64


def test_a_model_and_data_with_the_defaults_for_the_rest() -> None:
    config = target_of(None, [("train.per_device_batch_size", "4")], MODEL, DATA)
    assert (config.model.name_or_path, config.data.dataset) == (MODEL, DATA)
    assert config.train.per_device_batch_size == 4
    assert config.data.max_seq_length == 8192


def test_a_model_alone_where_that_is_enough() -> None:
    assert target_of(None, (), MODEL, needs_data=False).model.name_or_path == MODEL


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            (None, (), None, None),
            "nothing was given to look at: give --config FILE, or --model DIR --data FILE",
        ),
        ((None, (), MODEL, None), "--model alone was given"),
        ((None, (), None, DATA), "--data alone was given"),
        (("config.yaml", (), MODEL, DATA), "--config and --model and --data were given"),
        (("missing.yaml", (), None, None), "missing.yaml cannot be read"),
        ((None, (), "./nowhere", DATA), "there is no model folder './nowhere'"),
        ((None, [("data.max_seq_lngth", "5")], MODEL, DATA), "did you mean --data.max_seq_length"),
        (
            (None, [("data.max_seq_length", "one")], MODEL, DATA),
            "--data.max_seq_length: expected a whole number",
        ),
        (
            (None, [("data.sources", "[{dataset: a}]")], MODEL, DATA),
            "data.dataset and data.sources are both set",
        ),
    ],
)
def test_anything_else_is_told_in_one_line(given: tuple, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        target_of(*given)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    assert tokenizer_of(target_of(None, (), str(tmp_path / "model"), DATA)).eos_token == "<|im_end|>"
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(none of tokenizer.json"):
        tokenizer_of(target_of(None, (), str(tmp_path / "model"), DATA))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file; the folder that holds it is needed"):
        target_of(None, (), str(tmp_path / "model"), DATA)


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    save_model(tmp_path / "model", template=None)
    with pytest.raises(ConfigError, match="has no chat template: set model"):
        tokenizer_of(target_of(None, (), str(tmp_path / "model"), DATA))
