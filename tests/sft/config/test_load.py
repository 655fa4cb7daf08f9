"""A configuration from a file and the command line: what is taken, and what is told of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from palingenesis.errors import ConfigError
from palingenesis.sft.config import TrainConfig, load_config

LEAST = "model:\n  name_or_path: m\ndata:\n  dataset: d\n"


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return _write


def told(path: Path, *overrides: tuple[str, str]) -> str:
    """The one line that a configuration is refused with, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{path.parent}/", "")


# ---------------------------------------------------------------------- what is taken


def test_the_least_that_is_needed_and_the_defaults(write) -> None:
    config = load_config(write(LEAST))
    assert config.changed() == {"model.name_or_path": ("m", None), "data.dataset": ("d", None)}
    assert config.train.learning_rate == 2e-5
    assert config.plugins.objective == "ce"
    assert config.logging.trackers == ()
    assert config.model.lora is None


def test_values_as_yaml_writes_them(write) -> None:
    config = load_config(
        write(
            "\ufeff" + LEAST + "train:\n  learning_rate: 1e-5\n  warmup_ratio: 0\n  epochs: 2.0\n"
            "  max_steps: 1e3\nlogging: {run_name: 2026-01-01, use_mlflow: yes, use_wandb: true}\n"
            "plugins: {cadft: on}\nmemory:\n"
        )
    )
    assert config.train.learning_rate == 1e-5
    assert (config.train.epochs, config.train.max_steps) == (2, 1000)
    assert type(config.train.epochs) is int
    assert type(config.train.warmup_ratio) is float
    assert config.logging.run_name == "2026-01-01"
    assert config.logging.trackers == ("wandb", "mlflow")
    assert config.plugins.objective == "cadft"
    assert config.memory.chunked_loss is True


def test_lora_and_sources(write) -> None:
    config = load_config(
        write(
            "model: {name_or_path: m, lora: {rank: 4, targets: [q, v]}}\n"
            "data:\n  sources:\n  - {dataset: a.jsonl, weight: 3}\n  - {dataset: b, name: B}\n"
        )
    )
    assert config.model.lora is not None
    assert config.model.lora.targets == ("q", "v")
    assert [source.weight for source in config.data.sources] == [3.0, 1.0]
    assert config.flat()["model.lora.rank"] == 4
    assert config.flat()["data.sources"][1]["name"] == "B"
    value, default = config.changed()["model.lora"]
    assert (value["targets"], default) == (["q", "v"], None)
    assert load_config(write(LEAST)).flat()["model.lora"] is None
    assert load_config(write(LEAST), [("model.lora", "{}")]).model.lora is not None


def test_anchors_and_merged_keys_are_yaml_too(write) -> None:
    config = load_config(
        write(
            "model: {name_or_path: m}\ndata:\n  sources:\n"
            "  - &first {dataset: a.jsonl, weight: 3}\n  - <<: *first\n    dataset: b.jsonl\n"
        )
    )
    assert [(each.dataset, each.weight) for each in config.data.sources] == [("a.jsonl", 3), ("b.jsonl", 3)]


def test_overrides_lie_over_the_file(write) -> None:
    path = write(LEAST + "  eval_dataset: e\ntrain: {epochs: 3}\n")
    config = load_config(
        path,
        [
            ("train.epochs", "4"),
            ("train.epochs", "5"),
            ("train.learning_rate", "1e-4"),
            ("data.eval_dataset", "null"),
            ("model.lora.rank", "8"),
            ("model.lora.targets", "[q]"),
            ("logging.use_trackio", "true"),
            ("logging.run_name", "12"),
            ("train.output_dir", "a: b #c"),
            ("model.chat_template", "'~'"),
        ],
    )
    assert config.train.epochs == 5
    assert config.train.learning_rate == 1e-4
    assert config.data.eval_dataset is None
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.targets) == (8, ("q",))
    assert config.logging.trackers == ("trackio",)
    assert (config.logging.run_name, config.train.output_dir) == ("12", "a: b #c")
    assert config.model.chat_template == "~"


def test_it_is_frozen_and_checked_in_python_too() -> None:
    config = TrainConfig(model={"name_or_path": "m"}, data={"dataset": "d"})
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 2
    with pytest.raises(ValueError, match="frozen"):
        config.train = config.train
    with pytest.raises(ConfigError, match=r"^train\.epochs: expected a whole number"):
        TrainConfig(model={"name_or_path": "m"}, data={"dataset": "d"}, train={"epochs": "x"})
    assert TrainConfig(**config.model_dump()) == config


def test_loading_imports_nothing_heavy(write) -> None:
    path = write("model: {name_or_path: m}\ndata: {sources: [{dataset: a}, {dataset: b}]}\n")
    program = (
        f"import sys\nfrom palingenesis.sft.config import load_config\nload_config({str(path)!r})\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trian: {}", "there is no section 'trian'; did you mean 'train'?"),
        ("learning_rate: 1", "there is no section 'learning_rate'; did you mean 'train.learning_rate'?"),
        ("zzz: 1", "there is no section 'zzz'; there are model, data, train, parallel, memory, plugins, "),
        (
            "train: {learning_rat: 1}",
            "train has no option 'learning_rat'; did you mean 'train.learning_rate'?",
        ),
        (
            "train: {batch-size: 1}",
            "train has no option 'batch-size'; did you mean 'train.per_device_batch_size'?",
        ),
        ("train: {use_wandb: true}", "train has no option 'use_wandb'; did you mean 'logging.use_wandb'?"),
        ("memory: {zzz: 1}", "memory has no option 'zzz'; it has chunked_loss, loss_num_chunks"),
        ("memory: {on: 1}", "memory has no option 'true'; it has chunked_loss, loss_num_chunks"),
        (
            "train: {epochs: x, seeed: 1}",
            "train has no option 'seeed'; did you mean 'train.seed'? (and 1 more)",
        ),
    ],
)
def test_an_unknown_name_is_told_the_nearest(write, text: str, line: str) -> None:
    assert told(write(LEAST + text)).startswith(f"c.yaml: {line}")


def test_names_within_groups(write) -> None:
    assert told(write("model: {name_or_path: m, lora: {rnk: 3}}\ndata: {dataset: d}")) == (
        "c.yaml: model.lora has no option 'rnk'; did you mean 'model.lora.rank'?"
    )
    assert told(
        write("model: {name_or_path: m}\ndata: {sources: [{dataset: a}, {dataset: b, wieght: 1}]}")
    ) == ("c.yaml: data.sources[1] has no option 'wieght'; did you mean 'data.sources[1].weight'?")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("data: {dataset: d}", "model.name_or_path is missing: a hub name, or a folder"),
        ("model:\ndata: {dataset: d}", "model.name_or_path is missing: a hub name, or a folder"),
        ("model: {name_or_pth: m}", "model has no option 'name_or_pth'; did you mean 'model.name_or_path'?"),
        ("model: {name_or_path: m}", "data.dataset is missing: set it to a file, a folder or a hub name"),
        (
            "model: {name_or_path: m}\ndata: {sources: [{weight: 2}]}",
            "data.sources[0].dataset is missing: a file, a folder or a hub name",
        ),
    ],
)
def test_what_is_missing_is_named(write, text: str, line: str) -> None:
    assert told(write(text)).startswith(f"c.yaml: {line}")


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "train: {epochs: many}",
            'train.epochs: expected a whole number (at least 1), got "many"; default: 1',
        ),
        ("train: {epochs: true}", "train.epochs: expected a whole number (at least 1), got true; default: 1"),
        ("train: {epochs: 1.5}", "train.epochs: expected a whole number (at least 1), got 1.5; default: 1"),
        ("train: {epochs: [1]}", "train.epochs: expected a whole number (at least 1), got [1]; default: 1"),
        (
            "train: {learning_rate: 0}",
            "train.learning_rate: expected a number (above 0), got 0; default: 2e-05",
        ),
        ("train: {learning_rate: .inf}", "train.learning_rate: expected a number (above 0), got Infinity"),
        ("train: {learning_rate: fast}", 'train.learning_rate: expected a number (above 0), got "fast"'),
        ("train: {warmup_ratio: 1}", "train.warmup_ratio: expected a number (at least 0, below 1), got 1"),
        ("train: {optimizer: adam}", 'train.optimizer: expected one of "adamw", "adamw_8bit", "adafactor", '),
        (
            "logging: {stop_on: none}",
            'logging.stop_on: expected one of "warning", "critical" or null, got "none"',
        ),
        ("memory: {chunked_loss: 1}", "memory.chunked_loss: expected true or false, got 1; default: true"),
        ("memory: {chunked_loss: 'no'}", 'memory.chunked_loss: expected true or false, got "no"'),
        ("logging: {run_name: 12}", "logging.run_name: expected text or null, got 12: put it in quotes"),
        ("logging: {run_name: no}", "logging.run_name: expected text or null, got false: put it in quotes"),
        ("logging: {project: ''}", 'logging.project: expected text, got ""; default: palingenesis'),
        ("train: 5", "train: expected options under it, got 5"),
        (
            "train: {epochs: x, seed: y}",
            'train.epochs: expected a whole number (at least 1), got "x"; default: 1 (and 1',
        ),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_given(write, text: str, line: str) -> None:
    assert told(write(LEAST + text)).startswith(f"c.yaml: {line}")


@pytest.mark.parametrize("targets", ["q_proj", "[]", "[1]", "{}"])
def test_lora_targets(write, targets: str) -> None:
    line = told(write(f"model: {{name_or_path: m, lora: {{targets: {targets}}}}}\ndata: {{dataset: d}}"))
    assert line.startswith('c.yaml: model.lora.targets: expected "all-linear" or a list of names, got ')
    assert line.endswith("; default: all-linear")


def test_a_long_value_is_cut(write) -> None:
    line = told(write(LEAST + f"train: {{epochs: {'x' * 500}}}"))
    assert "xxx…; default: 1" in line
    assert len(line) < 160


# ---------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "c.yaml is empty: set at least model.name_or_path and data.dataset"),
        ("# nothing\n", "c.yaml is empty: set at least model.name_or_path and data.dataset"),
        ("- a\n", "c.yaml: expected sections such as 'model:' with options under them, got [\"a\"]"),
        ("model: x: y\n", "c.yaml, line 1, column 9: this is no YAML: mapping values are not allowed here"),
        (
            "a: [1,\nb: 2\n",
            "c.yaml, line 3, column 1: this is no YAML: while parsing a flow sequence, expected",
        ),
        ("model:\n\tx: y\n", "c.yaml, line 2, column 1: this is no YAML: while scanning for the next token"),
        ("a: !!python/name:os.system\n", "c.yaml, line 1, column 4: this is no YAML: could not determine a"),
        ("a: 1\na: 2\n", "c.yaml, line 2, column 1: 'a' is given twice, first in line 1: keep one of them"),
        ("a:\n  b: 1\n  c: 2\n  b: 1\n", "c.yaml, line 4, column 3: 'b' is given twice, first in line 2"),
        ("a: \x01\n", "c.yaml, line 1: this is no YAML: special characters are not allowed"),
        ("a: 1\n---\nb: 2\n", "c.yaml, line 2, column 1: this is no YAML: expected a single document"),
        ("a: !!int x\n", "c.yaml: this is no YAML that can be used: invalid literal for int"),
        ("[" * 2000, "c.yaml: this is nested too deep, or holds itself: use fewer levels"),
        ("a: &a {b: *a}\n", "c.yaml: this is nested too deep, or holds itself: use fewer levels"),
        (b"\xff\xfea", "c.yaml is no UTF-8 text (byte 0): save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration(write, text: str | bytes, line: str) -> None:
    assert told(write(text)).startswith(line)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert told(tmp_path / "no.yaml") == (
        "the configuration no.yaml cannot be read: No such file or directory; give the path of a YAML file"
    )
    (tmp_path / "f").mkdir()
    assert told(tmp_path / "f").startswith("the configuration f cannot be read: Is a directory")


# ---------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "train.epochs",
            "many",
            '--train.epochs: expected a whole number (at least 1), got "many"; default: 1',
        ),
        ("train.epochs", "[1", "--train.epochs, line 1, column 3: this is no YAML: "),
        ("train.epoch", "1", "there is no option --train.epoch; did you mean --train.epochs?"),
        ("model.seed", "1", "there is no option --model.seed; did you mean --train.seed?"),
        ("zzz.yyy", "1", "there is no option --zzz.yyy; the sections are model, data, train"),
        ("train.zzz", "1", "there is no option --train.zzz; train has output_dir, resume_from"),
        (
            "train",
            "{epochs: 1}",
            "--train is a whole section: set its options one by one, such as --train.output",
        ),
        ("model.lora.rnk", "1", "there is no option --model.lora.rnk; did you mean --model.lora.rank?"),
        (
            "data.sources.weight",
            "1",
            "there is no option --data.sources.weight: --data.sources is set as a whole",
        ),
        ("train.logging_steps", "3", "c.yaml: logging.health_tier2_every (10) is no multiple of"),
    ],
)
def test_an_override_that_cannot_be_used(write, name: str, text: str, line: str) -> None:
    assert told(write(LEAST), (name, text)).startswith(line)


def test_an_override_does_not_hide_what_is_wrong_with_the_file(write) -> None:
    assert told(write(LEAST + "train: 5\n"), ("train.epochs", "1")) == (
        "c.yaml: train: expected options under it, got 5"
    )
