"""Options that cannot work are refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from palingenesis.config import MonitorConfig, configured
from palingenesis.errors import ConfigError

NUMBERS = [name for name, field in MonitorConfig.model_fields.items() if field.annotation in (int, float)]
FLOATS = [name for name, field in MonitorConfig.model_fields.items() if field.annotation is float]


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        MonitorConfig(**options)
    told = str(caught.value)
    assert "\n" not in told
    return told


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_no_number(name: str, value: bool) -> None:
    told = refused(**{name: value})
    assert told.startswith(f"MonitorConfig: {name}={value} cannot be used: a number is needed, not True")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_threshold_is_finite(name: str, value: float) -> None:
    assert f"{name}={value} cannot be used" in refused(**{name: value})


def test_switches_and_numbers_stay_what_they_are() -> None:
    config = MonitorConfig(incidents=False, check_every=5, sigma=3)
    assert (config.incidents, config.check_every, config.sigma) == (False, 5, 3.0)
    assert MonitorConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("config", "shortcuts", "told"),
    [
        (None, {"check_every": True}, "check_every=True cannot be used: a number is needed"),
        (MonitorConfig(warmup=4), {"sigma": math.inf}, "sigma=inf cannot be used"),
        (None, {"warmup": "a\nb"}, "warmup='a"),
        ("many\nlines" * 50, {}, "is no MonitorConfig"),
        (None, {"layers": "fc"}, "is one string"),
    ],
)
def test_shortcuts_are_refused_in_one_line(config: Any, shortcuts: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(config, **shortcuts)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_value_that_prints_on_many_lines_is_told_on_one() -> None:
    class Loud:
        def __repr__(self) -> str:
            return "first\nsecond" * 100

    assert "check_every=first second" in refused(check_every=Loud())
    with pytest.raises(ConfigError) as caught:
        configured(Loud())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_shortcuts_go_over_the_config() -> None:
    base = MonitorConfig(check_every=10, warmup=4)
    assert configured(base, warmup=6, sigma=None) == MonitorConfig(check_every=10, warmup=6)
    assert configured(None) == MonitorConfig()
