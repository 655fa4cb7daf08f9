"""Options that are each fine and cannot work together, and those that look alike and can."""

from __future__ import annotations

from typing import Any

import pytest

from palingenesis.errors import ConfigError
from palingenesis.sft.config import TrainConfig

DATA = {"dataset": "d"}


def config(**sections: Any) -> TrainConfig:
    model = {"name_or_path": "m", **sections.pop("model", {})}
    return TrainConfig(model=model, data=sections.pop("data", DATA), **sections)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"plugins": {"dft": True, "deft": True}},
            "plugins.deft and plugins.dft are on together, and a run has one objective: set all but one",
        ),
        ({"data": {}}, "data.dataset is missing: set it to a file, a folder or a hub name, or list several"),
        (
            {"data": {**DATA, "sources": [{"dataset": "a"}]}},
            "data.dataset and data.sources are both set: a run reads one of them; leave one out",
        ),
        (
            {"data": {**DATA, "eval_dataset": "e", "eval_sources": [{"dataset": "a"}]}},
            "data.eval_dataset and data.eval_sources are both set: leave one out",
        ),
        (
            {"data": {"sources": [{"dataset": "a"}], "dataset_split": "test"}},
            "data.dataset_split belongs to data.dataset and nothing reads it with data.sources: set split",
        ),
        (
            {"data": {"sources": [{"dataset": "a"}], "messages_field": "m"}},
            "data.messages_field belongs to data.dataset and nothing reads it with data.sources: set ",
        ),
        (
            {"data": {"sources": [{"dataset": "a/chat.jsonl"}, {"dataset": "b/chat.jsonl"}]}},
            "data.sources: 2 sources are called 'chat' and their metrics could not be told apart: give ",
        ),
        (
            {
                "data": {
                    **DATA,
                    "eval_sources": [{"dataset": "a", "name": "x"}, {"dataset": "b", "name": "x"}],
                }
            },
            "data.eval_sources: 2 sources are called 'x'",
        ),
        (
            {"data": {**DATA, "packing": True, "max_seq_length": None}},
            "data.packing needs a length to pack to and data.max_seq_length is null: set data.max_seq_length",
        ),
        (
            {"train": {"min_learning_rate": 1e-3}},
            "train.min_learning_rate (0.001) is above train.learning_rate (2e-05), which the schedule "
            "starts from: set it to at most that",
        ),
        (
            {"train": {"min_learning_rate": 1e-6, "lr_scheduler": "constant"}},
            "train.min_learning_rate (1e-06) is never reached with train.lr_scheduler constant: set ",
        ),
        (
            {"train": {"logging_steps": 4}},
            "logging.health_tier2_every (10) is no multiple of train.logging_steps (4), and its numbers are "
            "collected on logging steps only: set logging.health_tier2_every to 8",
        ),
        (
            {"train": {"logging_steps": 50}, "logging": {"health_tier2_every": 50, "health_tier3_every": 20}},
            "logging.health_tier3_every (20) is no multiple of train.logging_steps (50), and its numbers are "
            "collected on logging steps only: set logging.health_tier3_every to 50",
        ),
        (
            {"model": {"lora": {}}, "parallel": {"strategy": "fsdp2"}},
            "model.lora does not work with parallel.strategy fsdp2 yet: set parallel.strategy to ddp",
        ),
        (
            {"plugins": {"info_sft_pbar": 0.9}},
            "plugins.info_sft_pbar is set, and nothing reads it: set plugins.info_sft to true, or leave ",
        ),
        ({"plugins": {"dft": True, "cadft_beta": 2}}, "plugins.cadft_beta is set, and nothing reads it"),
        (
            {"memory": {"chunked_loss": False, "loss_num_chunks": 4}},
            "memory.loss_num_chunks is set, and nothing reads it: set memory.chunked_loss to true, or leave ",
        ),
        (
            {"logging": {"rl_entropy_floor": 0.5}},
            "logging.rl_entropy_floor is set, and nothing reads it: set logging.rl_readiness to true",
        ),
    ],
)
def test_what_cannot_work_says_why_and_what_instead(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    told = str(caught.value)
    assert told.startswith(line)
    assert "\n" not in told
    assert "more)" not in told


def test_several_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"^train\.min_learning_rate .* \(and 2 more\)$"):
        config(
            train={"min_learning_rate": 1, "lr_scheduler": "constant"}, plugins={"cadft": True, "dft": True}
        )


@pytest.mark.parametrize(
    "sections",
    [
        {"plugins": {"info_sft": True, "info_sft_pbar": 0.9}},
        {"plugins": {"cadft": True, "cadft_beta": 0}},
        # Written out with their defaults, as `pgs config` prints them.
        {"plugins": {"info_sft_pbar": 0.93, "cadft_beta": 1}},
        {"memory": {"chunked_loss": False, "loss_num_chunks": 8}},
        {"logging": {"rl_readiness": True, "rl_entropy_floor": 0.5}},
        {"train": {"logging_steps": 5}},
        {"train": {"lr_scheduler": "linear", "min_learning_rate": 2e-5}},
        {"train": {"lr_scheduler": "constant"}},
        # Evaluation switched off for once: `--data.eval_dataset null`.
        {"data": {**DATA, "eval_every": 7, "eval_split": "test", "eval_samples": 3}},
        {"data": {"sources": [{"dataset": "a"}], "eval_dataset": "e", "messages_field": "m"}},
        {"data": {"sources": [{"dataset": "a"}, {"dataset": "a", "name": "b"}]}},
        {"data": {**DATA, "max_seq_length": None}},
        {"model": {"lora": {"rank": 1}}},
    ],
)
def test_what_can_work_is_taken(sections: dict[str, Any]) -> None:
    config(**sections)
