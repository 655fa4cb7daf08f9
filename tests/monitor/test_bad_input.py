"""Bad input to the library: one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig, PalingenesisError, load_run
from palingenesis.errors import ConfigError, LayerError, MonitorClosedError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    assert isinstance(error.value, PalingenesisError)
    return text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check_every": 0}, ["check_every=0", "50"]),
        ({"check_every": 2.5}, ["check_every=2.5"]),
        ({"sigma": -1}, ["sigma=-1", "2.5"]),
        ({"warmup": 1}, ["warmup=1"]),
        ({"config": {"sigma": 3}}, ["MonitorConfig"]),
        ({"layers": "0"}, ["('0',)"]),
        ({"gradients": "cooked"}, ["raw", "clipped"]),
        ({"start_step": -5}, ["start_step=-5"]),
        ({"start_step": "a"}, ["start_step='a'"]),
        ({"scaler": 3}, ["scaler=3", "GradScaler"]),
        ({"on_event": 3}, ["on_event=3"]),
        ({"resume": True, "overwrite": True}, ["exclude each other"]),
        ({"optimizer": "adam"}, ["param_groups"]),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Monitor(model(), out=None, **options)
    text = one_line(error)
    assert all(word in text for word in says), text


def test_a_model_or_folder_of_another_kind() -> None:
    with pytest.raises(ConfigError) as error:
        Monitor(None)  # type: ignore[arg-type]
    assert "model=None" in one_line(error)
    with pytest.raises(ConfigError) as error:
        Monitor(model(), out=5)  # type: ignore[arg-type]
    assert "out=5" in one_line(error)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'check_every'"):
        MonitorConfig(chek_every=3)


def test_a_config_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        MonitorConfig().sigma = 3.0  # type: ignore[misc]


def test_shortcuts_override_config() -> None:
    monitor = Monitor(model(), out=None, config=MonitorConfig(sigma=4, warmup=20), warmup=5)
    assert (monitor.config.sigma, monitor.config.warmup) == (4, 5)


def test_layers_that_match_nothing_show_what_names_look_like() -> None:
    with pytest.raises(LayerError) as error:
        Monitor(model(), out=None, layers=("blocks.*",))
    text = one_line(error)
    assert "blocks.*" in text
    assert "0, 1" in text


def test_a_model_without_trainable_parameters() -> None:
    for frozen in (model().requires_grad_(False), nn.ReLU()):
        with pytest.raises(LayerError) as error:
            Monitor(frozen, out=None)
        one_line(error)


def test_close_twice_and_step_after_close() -> None:
    monitor = Monitor(model(), out=None)
    monitor.close()
    for call in (monitor.close, monitor.step):
        with pytest.raises(MonitorClosedError) as error:
            call()
        one_line(error)


def test_leaving_the_with_block_after_close_is_fine() -> None:
    with Monitor(model(), out=None) as monitor:
        monitor.close()


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="palingenesis"):
        monitor = Monitor(model(), out=tmp_path / "file" / "run", check_every=1)
    assert "without a record" in caplog.text
    monitor.step(1.0)
    monitor.close()
    assert monitor.counts["checks"] == 1


@pytest.mark.parametrize("make", ["missing", "empty", "other"])
def test_a_folder_that_is_no_run(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if make != "missing":
        folder.mkdir()
    if make == "other":
        (folder / "notes.txt").write_text("nothing of ours")
    with pytest.raises(PalingenesisError) as error:
        load_run(folder)
    assert str(folder) in one_line(error)


def test_the_model_can_be_the_only_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    net = model()
    with Monitor(net, check_every=1, warmup=2) as monitor:
        for _ in range(5):
            net(torch.randn(3, 2)).square().mean().backward()
            monitor.step()
    assert load_run("pgs_run").verdict == "HEALTHY"
