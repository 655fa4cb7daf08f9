"""The command line: one small file a command, and no logic that a library user would miss.

``main`` is what ``pgs`` runs. Commands import what they need when they run, so that ``pgs --help`` is quick.
"""

from __future__ import annotations

from palingenesis.cli.entry import main

__all__ = ["main"]
