"""MonitorConfig: every threshold of the monitor in one place, checked once, then frozen."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from palingenesis.errors import ConfigError

#: What pydantic puts before a validator's own words.
_RAISED_HERE = "Value error, "
_LONGEST_VALUE = 60


class MonitorConfig(BaseModel):
    """What the monitor watches, how often, and where it draws its lines.

    The defaults of the alarm rule (``check_every``, ``warmup``, ``sigma``, ``factor``,
    ``consecutive``) are design choices made to keep false alarms rare on ordinary training noise; they
    are not measured optima. "Decade" means a factor of ten, the unit of log₁₀ norms.

    Raises:
        ConfigError: an unknown option, or a value out of range. The message is one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    layers: tuple[str, ...] = Field(("*",), description="Shell patterns of layer names to watch.")

    check_every: int = Field(50, ge=1, description="Optimizer steps between two checks.")
    warmup: int = Field(
        8, ge=2, description="Checks that build a layer's baseline before it can raise an alarm."
    )
    sigma: float = Field(
        2.5, gt=0, description="Standard deviations from the baseline at which a value is out of range."
    )
    factor: float = Field(
        10.0, gt=1, description="Least ratio to the baseline's mean at which a value is out of range."
    )
    consecutive: int = Field(2, ge=1, description="Checks in a row with one condition before its alarm.")
    baseline_rate_floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Least weight of a new value in the running mean and variance: 0.1 is about ten checks.",
    )

    common_mode: bool = Field(
        True, description="Take out what all layers do together before judging one of them."
    )
    common_mode_share: float = Field(
        0.85, gt=0.5, le=1, description="Share of the layers that must move together to call it common."
    )
    common_mode_spread: float = Field(
        0.5, gt=0, description="Decades around the median shift that count as moving together."
    )
    common_mode_min_layers: int = Field(3, ge=2, description="Layers below which no shift is called common.")
    clip_tolerance: float = Field(
        1e-4,
        gt=0,
        description="Relative spread of the total norm at which gradients count as clipped before step().",
    )

    absent_gradients: bool = Field(
        True, description="Count a gradient of None as no gradient where the layer's history has one."
    )
    presence_alpha: float = Field(
        1e-4,
        gt=0,
        lt=1,
        description="Chance, by a rarely used layer's own rate, at which its absence is called no_gradient.",
    )
    from_start: bool = Field(
        True, description="Alarm (never_trained) when a trained layer had no gradient in the whole warm-up."
    )
    level_shift: bool = Field(True, description="Accept a lasting new level as the baseline, with an event.")
    level_shift_checks: int = Field(
        20, ge=2, description="Checks in a row out of range after which the new level is accepted."
    )
    incidents: bool = Field(
        True, description="Gather alarms that begin together in one incident that says where to look first."
    )

    guard_every_step: bool = Field(
        True, description="Fold every step's layer norms on the device, to see between checks."
    )
    spike_factor: float = Field(
        30.0,
        gt=1,
        description="Ratio of a norm between two checks to the layer's usual peak at which its event is a "
        "warning; from factor on it is told as information.",
    )

    logging_steps: int = Field(1, ge=1, description="Steps between two rows of cheap numbers (tier 1).")
    tier2_every: int = Field(
        10, ge=1, description="Steps between two looks at gradient direction, noise and memory (tier 2)."
    )
    tier3_every: int = Field(
        100, ge=1, description="Steps between two looks at the weights: spectrum, norms, drift (tier 3)."
    )
    rl_readiness: bool = Field(False, description="Measure the entropy of the model's outputs at tier 1.")
    entropy_positions: int = Field(
        64, ge=2, description="Loss-bearing positions of each micro-batch that the entropy is estimated from."
    )
    noise_scale: bool = Field(
        True, description="Estimate the gradient noise scale, by hooks on the steps that tier 2 looks at."
    )
    drift: Literal["sketch", "exact", "off"] = Field(
        "sketch",
        description="How the distance from the first weights is measured: from a sketch of at most 1% of the "
        "model's bytes, exactly from a copy, or not at all.",
    )
    pretrained: bool | None = Field(
        None,
        description="Whether the layers knew something before, so that drift and a fall of stable rank are "
        "findings; None to find out of each by its matrix.",
    )

    stable_rank_floor: float = Field(
        3.0, ge=1, description="Stable rank below which a weight matrix is close to collapse."
    )
    imbalance_ceiling: float = Field(
        100.0, gt=1, description="Ratio of the largest to the smallest norm among like-named matrices."
    )
    drift_ceiling: float = Field(
        0.5, gt=0, description="Distance from the first weights, as a share of their norm, that is too far."
    )
    rl_entropy_floor: float = Field(
        1.0, ge=0, description="Output entropy, in nats, below which a warning is raised."
    )
    warning_margin: float = Field(
        1 / 3,
        gt=0,
        lt=1,
        description="How much worse than before training a number must get, where it was beyond its bound "
        "from the start, before it is a warning.",
    )
    rank_factor: float = Field(
        1e4,
        gt=1,
        description="How many times off the other ranks a rank's own gradient of a layer is named.",
    )

    loss_spike_factor: float = Field(
        1.5, gt=1, description="Least ratio to the running mean (where positive) of a loss spike."
    )
    loss_log_domain: bool = Field(
        True,
        description="For positive losses, ask for sigma standard deviations of the log loss as well: "
        "heavy-tailed losses then do not ring.",
    )

    skipped_in_a_row: int = Field(
        10, ge=1, description="Steps skipped in a row by the gradient scaler that make a warning."
    )
    skipped_share: float = Field(
        0.05, gt=0, le=1, description="Share of all steps skipped by the scaler that makes a warning."
    )

    spike_files: int = Field(
        50, ge=0, description="Most spikes of which the batch is kept in spikes/; 0 keeps none."
    )
    spike_samples: int = Field(
        64, ge=1, description="Most samples of a micro-batch that are told of there; the rest are counted."
    )
    spike_tokens: int = Field(32, ge=1, description="First token ids of each of them.")
    spike_text: int = Field(
        600, ge=0, description="Characters of its text, where the tokenizer is known; 0 keeps no text."
    )
    spike_memory_mb: int = Field(
        64,
        ge=1,
        description="MiB of batches that are held, by reference, until their steps are judged; the oldest "
        "are let go first.",
    )

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # To Python True is the number 1: check_every=True would check every step.
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float):
            raise ValueError("a number is needed, not True or False")
        return value

    def replace(self, **options: Any) -> MonitorConfig:
        """A copy with some options changed, validated again."""
        return MonitorConfig(**{**self.model_dump(), **options})


def configured(config: MonitorConfig | None, **shortcuts: Any) -> MonitorConfig:
    """``config`` (or the defaults) with the shortcuts that are not ``None`` put over it.

    Raises:
        ConfigError: ``config`` is something else, or a shortcut cannot work.
    """
    if config is not None and not isinstance(config, MonitorConfig):
        raise ConfigError(
            f"config={_shown(config)} is no MonitorConfig: pass MonitorConfig(...) or leave it out"
        )
    given = {name: value for name, value in shortcuts.items() if value is not None}
    layers = given.get("layers")
    if isinstance(layers, str):
        raise ConfigError(f"layers={layers!r} is one string: pass a tuple, such as ({layers!r},)")
    base = config if config is not None else MonitorConfig()
    return base.replace(**given) if given else base


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, MonitorConfig.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MonitorConfig.model_fields)}"
        return f"MonitorConfig has no option {name!r}; {hint}"
    told = first["msg"].removeprefix(_RAISED_HERE)
    told = told[0].lower() + told[1:]
    default = MonitorConfig.model_fields[str(first["loc"][0])].default
    return f"MonitorConfig: {name}={_shown(first['input'])} cannot be used: {told} (default: {default!r})"


def _shown(value: object) -> str:
    """A value on one line, however long and whatever it is."""
    line = " ".join(repr(value).split())
    return line if len(line) <= _LONGEST_VALUE else line[: _LONGEST_VALUE - 1] + "…"
