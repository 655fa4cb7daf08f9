"""The configuration of ``pgs train``: one YAML file in, one frozen and checked object out.

    sections      what can be set: the options of every section, with defaults, bounds and meaning
    whole         TrainConfig: all sections together
    combinations  options that cannot work together
    load          a YAML file and ``--section.key value`` to a TrainConfig
    wording       what an option takes, and what was wrong, in words
    schema        the JSON schema for editors

Nothing here imports torch, so that ``pgs config`` answers at once.
"""

from __future__ import annotations

from palingenesis.sft.config.load import load_config
from palingenesis.sft.config.schema import json_schema
from palingenesis.sft.config.sections import (
    DataOptions,
    LoggingOptions,
    LoraOptions,
    MemoryOptions,
    ModelOptions,
    ParallelOptions,
    PluginOptions,
    PreprocessOptions,
    SourceOptions,
    TrainOptions,
)
from palingenesis.sft.config.whole import TrainConfig

__all__ = [
    "DataOptions",
    "LoggingOptions",
    "LoraOptions",
    "MemoryOptions",
    "ModelOptions",
    "ParallelOptions",
    "PluginOptions",
    "PreprocessOptions",
    "SourceOptions",
    "TrainConfig",
    "TrainOptions",
    "json_schema",
    "load_config",
]
