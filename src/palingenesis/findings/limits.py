"""Limits: what the pathologies of a run are judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """From where on a number is a symptom. Fractions unless a unit is given."""

    alpha: float = 0.01
    """Chance, one-sided, that a trend or a median is not on the side on which it is said to be.

    A trend then needs five points and a median seven. Convention.
    """

    # -- how sure a finding is: chances that it is right; benchmarks/pathologies.py compares them with how
    #    often findings are

    certain: float = 0.99
    """The source says so itself: an event, or a number that is none."""

    agreeing: float = 0.9
    """Two signals of different kinds show it."""

    single: float = 0.75
    """One signal shows it, which little else does."""

    shared: float = 0.5
    """One signal shows it, and other causes show just the same."""

    explained: float = 0.7
    """Factor where another finding may have brought it about: it is less likely a cause of its own."""

    blurred: float = 0.9
    """Factor where a log shows means over steps, or no steps."""

    onset_window: int = 7
    """Values of which most have to be beyond something, from where it is said to begin."""

    onset_slack: float = 0.02
    """Share of the run by which a consequence may seem to begin before its cause."""

    # -- the learning rate

    cosine_low: float = -0.05
    """Median cosine of consecutive gradients below which steps undo each other.

    The project's page on signals says from 0; the sketch is off by up to 0.02, and noise is not one-sided.
    """

    norm_growth: float = 3.0
    """Growth of the gradient norm over the second half of a run that is no longer a fluctuation (factor)."""

    loss_rise: float = 0.1
    """Rise of the loss over the second half of a run, of its median, that is called diverging."""

    climb: float = 1.5
    """Loss over its first values (factor) that is no training that goes well, if the gradient climbs too."""

    climb_gradient: float = 2.0
    """Norm of the gradient over the lowest of its first ones (factor), for that."""

    climb_alone: float = 2.0
    """Loss over its first values (factor) that is none even where the norm of the gradient stays."""

    climb_first: int = 3
    """First losses, the lowest of which is where it began: without a warm-up the second is up already."""

    climb_window: int = 9
    """Losses in a row whose median is compared with that; fewer where there are not so many."""

    climb_least: int = 5
    """So many at least."""

    climb_noise: float = 6.0
    """The rise is also so many standard errors of where it began."""

    spikes_many: int = 3
    """Loss spikes (episodes) that are a habit and no accident."""

    flat_steps: int = 500
    """Steps without progress before a loss is called flat. From the project's table of pathologies."""

    flat_change: float = 0.03
    """Change of the loss over all of a run, of its median, up to which it is flat."""

    learned_loss: float = 0.05
    """Loss (nats a token) from which there is nothing left to learn: flat there is no symptom."""

    schedule_end: float = 1e-4
    """Distance of a learning rate from its lowest, of its highest, within which its schedule has ended."""

    schedule_tail: float = 0.1
    """Share of the run after the schedule's end that cannot be its plan. A cosine spends 1% there."""

    schedule_back: float = 0.1
    """Learning rate, of its highest, up to which one that had ended may come back: a cosine that goes on."""

    schedule_changes: int = 10
    """Changes of the learning rate on its way down, at least: one that goes in few steps was planned so."""

    schedule_marks: tuple[float, ...] = (0.9, 0.5, 0.1)
    """Shares of the peak at which a learning rate is compared with its schedule, first to last."""

    schedule_off: float = 1.25
    """Factor by which it may come to one of them too early or too late: warm-up, rounding, sparse rows."""

    schedule_rows: float = 3.0
    """Rows by which it is off, at least."""

    zero_grad_cosine: float = 0.95
    """Median cosine of consecutive gradients above which they are sums that grow."""

    # -- numbers

    updates_lost: float = 50.0
    """Share of elements whose update rounds away, in percent, from which training is mostly lost."""

    zero_rounding: float = 100.0
    """Last digits of a written loss above which the one before a zero has to be, for the zero to be exact."""

    skipped: float = 0.05
    """Share of steps that a gradient scaler may skip while it looks for its scale."""

    skipped_least: int = 5
    """Skipped steps, at least."""

    hidden_rows: int = 3
    """Last rows with a finite loss and a norm that is not: fewer may be a skipped batch."""

    recovered_rows: int = 10
    """Finite losses to the end that show weights to be whole: with NaN in them no loss is finite."""

    # -- data

    spikes_skipped: float = 0.05
    """Share of steps that a spike rule skipped. From the project's table of pathologies."""

    outlier: float = 8.0
    """Distance of a log loss from the running median, in robust standard deviations, that noise never has."""

    outlier_skew: float = 4.0
    """How many times as many losses are so far above as below, where it is not just a heavy tail."""

    outlier_height: float = 2.0
    """Losses so far out against their neighbours (factor, median), which unlike sources seldom make."""

    outlier_share: float = 0.01
    """Share of losses so far out that makes data bad rather than one batch."""

    outliers_least: int = 5
    """Losses so far out, at least."""

    window: int = 21
    """Losses in the running median."""

    packing_difference: float = 0.01
    """Difference of a packed run's loss to the unpacked run's that batch order does not make."""

    packing_bins: int = 12
    """Parts in which two runs are compared."""

    # -- weights and outputs

    imbalance: float = 10.0
    """Gradient over weight of a block against the median of its likes (factor). From the same table."""

    imbalance_updates: float = 3.0
    """The same for what a step really changed: below, the optimizer has evened it out (factor)."""

    imbalance_looks: int = 3
    """Looks at least, all but one in five of which must show it."""

    likes: int = 4
    """Blocks of one kind that are needed to say what is usual among them."""

    entropy: float = 1.5
    """Output entropy (nats) below which little diversity is left. From the same table."""

    entropy_fall: float = 0.2
    """Fall of the entropy over the run that makes it this run's doing."""

    stable_rank: float = 3.0
    """Where the record does not say by which floor it was judged."""

    random_loss: float = 5.0
    """First losses (nats a token) above which a language model knows nothing yet: its weights are random."""

    drift: float = 0.5
    """Where the record does not say by which ceiling it was judged."""

    # -- evaluation

    eval_rise: float = 0.01
    """Rise of the evaluation loss above its lowest that is worth a finding."""

    eval_after: int = 5
    """Evaluations after the lowest one that are needed to speak of a trend."""

    # -- resuming

    resume_window: int = 20
    """Rows on either side of a resume that are compared."""

    resume_rise: float = 0.1
    """Rise of the loss over a resume that no new order of the data explains."""

    # -- the machine

    memory_pct: float = 95.0
    """Share of the device's memory, in percent, above which the next long batch may not fit. Same table."""

    memory_unused: float = 30.0
    """Share of the device's memory, in percent, below which a batch of twice the size surely fits."""

    memory_growth: float = 0.2
    """Growth of memory over the second half of a run, of its median, that is no cache being filled."""

    memory_looks: int = 20
    """Readings of memory that are needed to speak of growth."""

    mfu: float = 0.1
    """Share of the device's peak below which it mostly waits. Large models reach 0.3 to 0.6."""

    throughput_fall: float = 0.2
    """Fall of the tokens per second over the run."""

    stall: float = 3.0
    """Time of a step against the median that is a stall, where its tokens do not account for it (factor)."""

    stall_share: float = 0.1
    """Share of all time lost in stalls."""

    warmup_rows: int = 5
    """First rows that are not judged by time: compilation, caches, first files."""
