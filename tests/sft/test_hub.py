"""A hub that does not answer is asked once, and what is told is one line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from palingenesis.errors import ConfigError
from palingenesis.preflight.target import target_of, tokenizer_of
from palingenesis.sft import hub
from palingenesis.sft.data import Source, load_rows
from palingenesis.sft.hub import data_from_cache_alone, hub_answers, hub_options


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that were made, none of which is answered."""
    import huggingface_hub

    requests: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> Any:
            assert 0 < timeout <= 10
            requests.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(hub, "_known", None)
    return requests


def test_it_is_asked_once(asked: list[str]) -> None:
    assert not hub_answers() and not hub_answers()
    assert hub_options("nobody/nothing") == {"local_files_only": True}
    assert len(asked) == 1


def test_and_again_after_a_while(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hub_answers()
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not hub_answers()
    assert len(asked) == 2


def test_one_that_answers_is_left_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_known", (time.monotonic(), True))
    assert hub_options("nobody/nothing") == {}


def test_a_folder_is_nothing_to_ask_for(asked: list[str], tmp_path: Path) -> None:
    assert hub_options(str(tmp_path)) == {} and asked == []


def test_a_model_that_is_missing_is_told_at_once(asked: list[str]) -> None:
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"'nobody/nothing'.*does not answer.*--model.name_or_path DIR"
    ) as error:
        tokenizer_of(target_of(None, (), "nobody/nothing", "demo:chatterbot"))
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 10 and len(asked) == 1


def test_data_that_is_missing_is_told_at_once(asked: list[str]) -> None:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"'nobody/nothing'.*does not answer") as error:
        load_rows(Source("nobody/nothing"))
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 10 and len(asked) == 1
    assert datasets.config.HF_HUB_OFFLINE is before


def test_data_are_asked_for_again_afterwards() -> None:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    with data_from_cache_alone():
        assert datasets.config.HF_HUB_OFFLINE is True
    assert datasets.config.HF_HUB_OFFLINE is before
