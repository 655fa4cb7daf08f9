"""StatusLimits: from where on a number of a running job is worth telling somebody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StatusLimits:
    """What a status is judged by. Fractions unless a unit is given; conventions where no source is named."""

    alpha: float = 0.01
    """Chance, one-sided, that a trend or a median is not on the side on which it is said to be."""

    # -- the loss

    least_losses: int = 10
    """Losses from which on a log that shows nothing wrong is called healthy. A trend needs five."""

    level_losses: int = 10
    """Last losses whose median is called the loss."""

    window_share: float = 0.25
    """Last part of the losses whose trend is told."""

    window_least: int = 20
    """Losses in that window at least, if there are so many: the interval of the slope is wide below."""

    flat: float = 0.01
    """Change of the loss over the window, of its median, below which it is flat."""

    rise: float = 0.05
    """Rise over the window, of its median, that is called diverging: the whole interval is above it."""

    back: float = 0.1
    """Distance of the loss from the lowest it has been, of that, from which it has lost ground."""

    back_noise: float = 6.0
    """It is also so many standard errors: among 64 blocks the lowest is low by about 2.4 by chance."""

    blocks: int = 64
    """Parts of a run whose medians are compared for that."""

    block_least: int = 5
    """Losses in such a part at least: its median then survives two wild ones."""

    least_blocks: int = 8
    """Such parts at least: fewer have no scale of their differences."""

    zero_drop: float = 100.0
    """A loss of exactly 0 right after one that is so many times what the log can still show is no loss."""

    # -- speed and time left

    speed_rows: int = 20
    """Last rows whose speed is told, and compared with the rows before."""

    speed_least: int = 7
    """Rows on either side of that comparison: fewer have no interval of the median at ``alpha``."""

    slower: float = 0.3
    """Fall of the tokens per second that is told: it surely fell by more."""

    warmup_rows: int = 5
    """First rows after a start that say nothing of speed: compilation, caches, first files."""

    pace_blocks: int = 10
    """Parts of a run whose mean pace is compared for the uncertainty of the time left."""

    pace_errors: float = 2.0
    """Standard errors on either side in the interval of the time left: about 95%."""

    # -- silence

    stale_intervals: float = 5.0
    """Usual times between two rows without a line, from which on a run counts as stalled."""

    stale_gaps: float = 2.0
    """It must also be so many times the longest silence so far: an evaluation, a checkpoint."""

    stale_least_s: float = 60.0
    """Seconds of silence below which no run is stalled: logs are buffered."""

    stale_unknown_s: float = 1800.0
    """Where nothing is known of the speed. PyTorch gives up on a collective after 10 or 30 minutes."""

    copied_s: float = 54_000.0
    """A file that changed so much later than its last line says is a copy: zones differ by 14 h at most."""

    # -- steps that were lost

    skipped: float = 0.05
    """Share of skipped steps that is told as wrong. From the project's table of pathologies."""

    skipped_most: float = 0.5
    """Share from which on there is no training."""

    loop: int = 3
    """Starts in a row that got no further than the one before: the run fails at the same place."""

    # -- reading

    unread: float = 0.5
    """Share of lines that could not be read from which on it is said that there may be more in the log."""

    # -- causes

    confidence: float = 0.5
    """Confidence of a pathology from which on a status tells it: it is likelier than not."""
