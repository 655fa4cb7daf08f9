"""CurveLimits: what the analysis of a loss curve is judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CurveLimits:
    """Chances, shares and counts of rows. Where no source is named, ``benchmarks/curves`` measured it."""

    least_rows: int = 8
    """Losses below which a curve is not judged, only told."""

    # -- spikes

    spike_alpha: float = 0.003
    """Chance that the noise of a whole curve makes a spike, by the tail that its own noise shows."""

    spike_past: int = 15
    """Losses before one whose median it is compared with."""

    spike_widths: tuple[int, ...] = (1, 3, 7)
    """Losses in a row whose median is judged: noise with heavy tails seldom makes several of them."""

    spike_scale_rows: int = 201
    """Losses around one from which the size of the noise is taken."""

    spike_wide: int = 101
    """Losses over which the fall of a curve is taken out of its noise."""

    spike_narrow: int = 31
    """The same where it falls steeply."""

    spike_near: int = 2
    """Rows within which high losses belong together."""

    spike_apart: int = 10
    """Rows within which high losses are one spike."""

    spike_share: float = 0.05
    """Height of a spike as a share of the loss; of the curve's range where losses are not positive."""

    spike_gap: float = 1.5
    """Height of the lowest spike over the highest of the noise (factor): what forms a series is noise."""

    spike_often: float = 0.01
    """Share of single losses that reach a height which is then that of ordinary, if harder, batches."""

    spike_often_rows: int = 6
    """And at least so many."""

    spike_most: float = 0.01
    """Share of the rows that can be spikes; what comes oftener is the curve's noise."""

    spike_back: float = 0.25
    """A spike is over where this much of its height is left, or as much as noise makes."""

    spike_trace: float = 3.0
    """Rows that are left out of everything but spikes, in the rows that a spike took."""

    spike_over: float = 0.1
    """Share of the rows, at least 50 of them: what is above for half of it to the end is a rise, no spike."""

    # -- plateaus

    plateau_blocks: int = 20
    """Medians (a curve has about a hundred, short ones fewer) that are needed to speak of a plateau."""

    plateau_most: int = 4
    """Plateaus of one curve that are looked for."""

    plateau_share: float = 0.08
    """Of the run's steps, the shortest plateau."""

    plateau_from: float = 0.02
    """Share of the run before which no plateau begins."""

    plateau_grid: int = 18
    """Places at which a plateau may begin or end on the first search; the second goes on between them."""

    plateau_evidence: float = 30.0
    """By how much a stop explains the curve better than a smooth fall, in squared standard errors."""

    plateau_flat: float = 0.35
    """Fall within a plateau, of what it would have been without one."""

    schedule_evidence: float = 20.0
    """By how much a schedule that the log does not tell explains a curve better than a constant rate."""

    plateau_alpha: float = 0.05
    """Chance, one-sided, in the interval of the slope within a plateau."""

    plateau_missed: float = 0.05
    """What a plateau keeps the loss from, of all of its fall, that is worth telling."""

    plateau_level: float = 0.01
    """The same of the loss itself."""

    # -- the end of a curve

    level_share: float = 0.25
    """Last part of the run, at least, that is flat where a loss is said to have levelled off."""

    level_fall: float = 0.02
    """Fall in it, by the fitted curve, of all of the fall."""

    level_of_loss: float = 0.02
    """And of the loss, where losses are positive."""

    level_change: float = 0.06
    """And by the losses themselves: a larger change, of all of the fall, is ruled out."""

    # -- divergence

    rise_blocks: int = 3
    """Last medians, at least, that are above where the loss has been."""

    rise_errors: float = 9.0
    """Rise in standard errors; the lowest level before it was chosen among many."""

    rise_share: float = 0.03
    """Rise as a share of the loss."""

    rise_of_fall: float = 0.1
    """And of all of the fall before it."""

    rise_of_low: float = 0.06
    """Or of the loss, where that is less: one that is nearly zero may rise to many times what it was."""

    rise_jump: float = 0.6
    """Share of the rise within two medians that makes it a jump."""

    rise_rate: float = 1.2
    """A rise while the learning rate grew by this factor is the schedule's."""

    # -- periods

    period_rows: int = 64
    """Rows below which no pattern is looked for."""

    period_least: int = 8
    """Repetitions that make a pattern."""

    period_alpha: float = 0.001
    """Chance that noise makes a pattern."""

    period_power: float = 1.6
    """And a line of the spectrum above its neighbours is so many times what that chance asks for."""

    period_size: float = 0.002
    """Height of a pattern, as a share of the loss (of the range where losses are not positive)."""

    # -- the forecast

    forecast_more: float = 0.2
    """More steps, of those that were done, of which it is said what they would bring."""

    forecast_factor: float = 10.0
    """Highest over lowest value of an interval beyond which a number is not known at all."""

    forecast_chance: float = 0.95
    """Of the laws that fit, how many lie within an interval. No curve is exactly such a law: on made curves
    the interval of the forecast holds the truth in four of five (``benchmarks/curves/table.py``)."""

    # -- the first loss

    chance_within: float = 0.01
    """Distance of the first loss from the logarithm of a vocabulary, as a share, that makes it a guess."""

    # -- severities

    spikes_many: int = 3
    """Spikes that are a habit and no accident. As in ``findings.limits``."""
