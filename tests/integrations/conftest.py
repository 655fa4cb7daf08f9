"""The monitor that callbacks make, with notes of what it was given."""

from __future__ import annotations

import pytest
from tests.integrations.looks import Noting

from palingenesis.integrations import _shared


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks make a :class:`~tests.integrations.looks.Noting` monitor."""
    monkeypatch.setattr(_shared, "Monitor", Noting)
