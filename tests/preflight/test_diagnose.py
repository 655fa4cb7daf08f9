"""All checks together: what is said of a sound run, of a broken one, and of what could not be looked at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.preflight.models import agree
from tests.sft.runs import make_rows, settings

from palingenesis.errors import ConfigError, RunLogError
from palingenesis.findings import Report
from palingenesis.preflight.diagnose import count_rows, diagnose, diagnose_log
from palingenesis.sft.config import TrainConfig

Make = Callable[..., TrainConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A sound run in a folder of its own."""
    sound: dict[str, Any] = {
        "train__max_steps": 40,
        "train__learning_rate": 1e-3,
        "logging__check_every": 10,
        "logging__health_tier3_every": 20,
    }
    settings(tmp_path)
    agree(tmp_path / "model")
    return lambda **changes: TrainConfig(**settings(tmp_path, **{**sound, **changes}))


def checks(report: Report) -> list[str]:
    return [finding.check for finding in report.findings if finding.severity != "info"]


def test_a_sound_run(make: Make) -> None:
    report = diagnose(make())
    assert checks(report) == [] and report.code == 0
    facts = report.facts
    assert facts["checked"] == ["model", "masks and data", "tokenizer", "memory", "configuration"]
    assert facts["rows"] == 90 and facts["steps"] == 40
    assert facts["parameters"] == facts["model"]["trained"]
    if not torch.cuda.is_available():
        assert [one for one in facts["not_checked"] if "no GPU" in one]
    assert facts["memory"]["peak_bytes"] > 0 and facts["validate"]["train"]["rows"] == 50


def test_each_part_is_heard(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(
        train__learning_rate=0.1,
        data__eval_dataset=str(make().data.dataset),
        data__eval_every=10,
        data__max_seq_length=20,
    )
    monkeypatch.setattr("palingenesis.preflight.diagnose.SEARCH_SECONDS", 0.0)
    report = diagnose(config, gpu_bytes=10**8)
    found = checks(report)
    assert {"config.learning_rate_high", "data.eval_leak", "memory.does_not_fit"} <= set(found)
    assert report.code == 1


def test_full_does_a_few_steps(make: Make) -> None:
    report = diagnose(make(), mode="full")
    # The weights are random, and the folder is taken for a pretrained model.
    assert checks(report) == ["first_step.loss_at_random"]
    assert report.facts["checked"][-1] == "first steps"
    assert report.facts["first_steps"]["planned_steps"] == 40


def test_a_step_that_fails_is_a_finding(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 20 GiB")

    monkeypatch.setattr("palingenesis.preflight.first_steps.make_trainer", fails)
    report = diagnose(make(), mode="full")
    (found,) = (finding for finding in report.findings if finding.check == "first_step.failed")
    assert found.message == (
        "a step of training fails: RuntimeError: CUDA out of memory. Tried to allocate 20 GiB"
    )


def test_a_model_that_is_only_described(make: Make, tmp_path: Path) -> None:
    """Without a tokenizer nothing is known of masks, which is most of what is asked for."""
    config = make()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(config.model.name_or_path) / "config.json", bare)
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*pgs profile needs none") as error:
        diagnose(make(model__name_or_path=str(bare)), mode="full")
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_template(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(make().model.name_or_path, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template: set model.chat_template"):
        diagnose(make(model__name_or_path=str(folder)))


def test_a_model_without_a_description(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(make().model.name_or_path, folder)
    (folder / "config.json").unlink()
    report = diagnose(make(model__name_or_path=str(folder)))
    (found,) = (f for f in report.findings if f.check == "config.not_checked")
    assert found.evidence["parts"] == ["model"] and report.code == 1
    assert "masks and data" in report.facts["checked"]


def test_data_in_a_hub_that_is_out_of_reach(make: Make) -> None:
    report = diagnose(make(data__dataset="nobody/nothing"))
    (found,) = (f for f in report.findings if f.check == "config.not_checked")
    assert found.evidence["parts"] == ["masks and data"] and "nobody/nothing" in found.message
    assert "passes over the data" in report.facts["not_checked"]


def test_neither_model_nor_data(make: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.name_or_path: the tokenizer of 'nobody/nothing'"
    ) as error:
        diagnose(make(model__name_or_path="nobody/nothing"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing"])
def test_a_data_file_that_is_missing_is_no_finding(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.dataset: .*missing"):
        diagnose(make(data__dataset=name))


def test_rows_are_counted_as_far_as_time_allows(make: Make, tmp_path: Path) -> None:
    config = make()
    assert count_rows(config, "train") == 90
    assert count_rows(config, "eval") is None
    many = make(data__dataset=str(make_rows(tmp_path / "many.jsonl", 1500)))
    assert count_rows(many, "train") == 1500
    assert count_rows(many, "train", seconds=0.0) is None


def test_packing_is_reckoned_with(make: Make) -> None:
    apart, packed = (diagnose(make(data__packing=packing)).facts["rows"] for packing in (False, True))
    assert 0 < packed < apart == 90


# -- after a run -------------------------------------------------------------------------------------------


def test_a_run_that_is_over(tmp_path: Path) -> None:
    from palingenesis import Monitor

    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Monitor(layer, optimizer, out=tmp_path / "run", check_every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(torch.ones(2, 4)).square().mean()
            loss.backward()
            monitor.step(loss)
            optimizer.step()
    report = diagnose_log(tmp_path / "run")
    assert report.facts["verdict"] and report.code in (0, 1)


def test_a_log_of_another_trainer(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    losses = [2.0, 1.9, float("nan"), float("nan")]
    log.write_text(
        "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses))
    )
    (finding,) = diagnose_log(log).findings
    assert finding.check == "run.nonfinite" and finding.since == 2
    assert finding.severity == "critical" and finding.evidence["rows"] == 2
    with pytest.raises(RunLogError, match="there is no"):
        diagnose_log(tmp_path / "missing")
