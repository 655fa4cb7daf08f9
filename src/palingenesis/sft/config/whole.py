"""TrainConfig: all sections together, checked for what cannot work together."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from palingenesis.errors import ConfigError
from palingenesis.sft.config.combinations import conflicts
from palingenesis.sft.config.sections import (
    DataOptions,
    LoggingOptions,
    MemoryOptions,
    ModelOptions,
    ParallelOptions,
    PluginOptions,
    PreprocessOptions,
    TrainOptions,
)
from palingenesis.sft.config.wording import and_more, one_line


class TrainConfig(BaseModel):
    """Everything a fine-tuning run is told.

    Raises:
        ConfigError: an unknown option, a value out of range, or options that cannot work together. The
            message is one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelOptions = Field(..., description="The model, and how it computes.")
    data: DataOptions = Field(
        default_factory=DataOptions, description="What is trained on, and what is evaluated on."
    )
    train: TrainOptions = Field(
        default_factory=TrainOptions, description="How long, how fast, and where it is kept."
    )
    parallel: ParallelOptions = Field(
        default_factory=ParallelOptions, description="What several processes do with the model."
    )
    memory: MemoryOptions = Field(
        default_factory=MemoryOptions, description="What saves memory without changing a number."
    )
    plugins: PluginOptions = Field(
        default_factory=PluginOptions, description="The objective: cross-entropy, or at most one of these."
    )
    preprocess: PreprocessOptions = Field(
        default_factory=PreprocessOptions, description="What is done about bad rows."
    )
    logging: LoggingOptions = Field(
        default_factory=LoggingOptions, description="Trackers, and how often the monitor looks."
    )

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(one_line(error, TrainConfig)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _nothing_is_the_defaults(cls, value: Any) -> Any:
        # What `train:` is where every option under it is commented out.
        return {} if value is None else value

    @model_validator(mode="after")
    def _works_together(self) -> TrainConfig:
        found = conflicts(self)
        if found:
            raise ValueError(and_more(found))
        return self

    def flat(self) -> dict[str, Any]:
        """Every option by its dotted name, as plain values: what a tracker shows as the run's configuration.

        Lists stay lists; a group that is null is one entry.
        """
        return _flat(self.model_dump(mode="json"))

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """``section.option`` to value and default, where they differ. A required option's default is None."""
        differing: dict[str, tuple[Any, Any]] = {}
        for section in type(self).model_fields:
            options: BaseModel = getattr(self, section)
            values = options.model_dump(mode="json")
            for name, info in type(options).model_fields.items():
                default = None if info.is_required() else info.default
                if getattr(options, name) != default:
                    differing[f"{section}.{name}"] = (values[name], default)
        return differing


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found
