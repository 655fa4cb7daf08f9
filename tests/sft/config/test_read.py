"""No option exists that nothing reads: each is looked for in the source of the package."""

from __future__ import annotations

import pytest
from tests.sft.config.readers import read_by, read_in
from tests.sft.config.tables import ROOT, groups

from palingenesis.sft.config import (
    DataOptions,
    LoggingOptions,
    LoraOptions,
    ModelOptions,
    PluginOptions,
    SourceOptions,
    TrainConfig,
    TrainOptions,
)

PACKAGE = ROOT / "src" / "palingenesis"
READ = read_in(PACKAGE, leaving_out=PACKAGE / "sft" / "config")

#: Options that are read through a property of their section, which must be read in turn.
THROUGH = {
    **{(PluginOptions, name): "objective" for name in ("deft", "dft", "info_sft", "cadft")},
    **{(LoggingOptions, f"use_{name}"): "trackers" for name in ("wandb", "trackio", "tensorboard", "mlflow")},
}
FIELDS = [(group, name) for group, options in groups().items() for name in options.model_fields]


@pytest.mark.parametrize(("group", "name"), FIELDS, ids=".".join)
def test_something_reads_every_option(group: str, name: str) -> None:
    options = groups()[group]
    assert (options, THROUGH.get((options, name), name)) in READ, f"nothing reads {group}.{name}"


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("config.train.epochs", {(TrainOptions, "epochs")}),
        ("self._config.train.epochs + 1", {(TrainOptions, "epochs")}),
        ("def f(config):\n options = config.train\n return options.seed", {(TrainOptions, "seed")}),
        ("def f(c: TrainConfig):\n a, b = c.data, c.train\n return b.seed", {(TrainOptions, "seed")}),
        (
            "def f(each: Sequence[SourceOptions]):\n return [e.weight for e in each]",
            {(SourceOptions, "weight")},
        ),
        ("for s in config.data.sources: s.mode", {(DataOptions, "sources"), (SourceOptions, "mode")}),
        (
            "def f(config):\n lora = config.model.lora\n def g(): return lora.rank",
            {(ModelOptions, "lora"), (LoraOptions, "rank")},
        ),
        ("config.plugins.objective", {(PluginOptions, "objective")}),
        # No readings.
        ("other.train.epochs", set()),
        ("def f(config):\n options = config.train\ndef g(options):\n return options.seed", set()),
        ("config.train.model_dump()", {(TrainOptions, "model_dump")}),
        ("getattr(config.train, 'seed')", set()),
        ("'config.train.seed'", set()),
        ("seed = 1  # config.train.seed", set()),
    ],
)
def test_what_counts_as_reading(source: str, read: set[tuple[type, str]]) -> None:
    assert {each for each in read_by(source) if each[0] is not TrainConfig} == read
