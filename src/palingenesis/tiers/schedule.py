"""When each tier looks. Pure arithmetic on step numbers, the same on every rank."""

from __future__ import annotations

from palingenesis.config import MonitorConfig


class Schedule:
    """Which tiers are due at a step.

    Args:
        config: the cadences.
        max_steps: the number of the run's last step, if it is known.
    """

    def __init__(self, config: MonitorConfig, max_steps: int | None) -> None:
        self._config, self._max_steps = config, max_steps
        self.first: int | None = None
        # The last step of a run that would end before its first regular look at the weights.
        self.at_end: int | None = None

    def begin(self, step: int) -> None:
        """Tell the first step that is looked at: the weights are then still those before training."""
        self.first = step
        regular = -(-step // self._config.tier3_every) * self._config.tier3_every
        if self._max_steps is not None and step < self._max_steps < regular:
            self.at_end = self._max_steps

    def check(self, step: int) -> bool:
        """A check of the gradients."""
        return step % self._config.check_every == 0

    def first_tier(self, step: int) -> bool:
        """Tokens, entropy, loss statistics."""
        return step % self._config.logging_steps == 0

    def second_tier(self, step: int) -> bool:
        """Gradient direction, noise, memory."""
        return step % self._config.tier2_every == 0

    def third_tier(self, step: int) -> bool:
        """The weights: regularly, before the first step, and before the end of a short run."""
        return step % self._config.tier3_every == 0 or step in (self.first, self.at_end)

    def watches_update(self, step: int) -> bool:
        """Whether what this step does to the weights is to be seen at the next one."""
        if self.at_end is not None:
            return step in (self.first, self.at_end - 1)
        return self.third_tier(step)

    def needs_norms(self, step: int) -> bool:
        """Whether a look needs every unit's gradient norm of this step."""
        return self.second_tier(step) or self.second_tier(step + 1) or self.third_tier(step)

    def ranks_meet(self, step: int) -> bool:
        """Whether ranks tell one another what they found until now."""
        due = self.check(step) or self.second_tier(step) or self.third_tier(step)
        return due or self.watches_update(step - 1)

    def missed_third_tier(self, step: int) -> bool:
        """Whether a run that ends after ``step`` has looked at the weights at its start only."""
        if self.first is None or step in (self.first, self.at_end):
            return False
        every = self._config.tier3_every
        return step // every == (self.first - 1) // every
