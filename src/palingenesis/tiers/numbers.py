"""The numbers of a run: looks on their way, the readings they become, their warnings and their rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palingenesis import lifecycle
from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.layers import Layers
from palingenesis.reading import Reading
from palingenesis.record.reader import Run
from palingenesis.signals.cosine import Norms
from palingenesis.tiers.decode import EACH, SHARES, Decoded, Decoder
from palingenesis.tiers.look import Look, Tiers
from palingenesis.tiers.missing import Missing
from palingenesis.tiers.rows import Rows
from palingenesis.tiers.start import keep_start, read_start, start_file
from palingenesis.watch.bounds import BoundsWatch
from palingenesis.watch.ranks import RankWatch

RANK, DRIFT, NOISE = "health/stable_rank", "health/weight_drift", "health/gns"
# What else bounds are for, and the standard error of what is estimated.
ENTROPY = "health/output_entropy"
BOUNDED = ("health/weight_norm_ratio", ENTROPY)
WARNINGS = "health/warnings"

# Rows that may wait beyond a check's worth for what other ranks have to tell, and for the training loop.
SPARE_ROWS, MOST_ROWS = 32, 4096


class Numbers:
    """What the tiers find, from look to row.

    Args:
        tiers: which look.
        config: cadences and bounds.
    """

    def __init__(self, tiers: Tiers, config: MonitorConfig) -> None:
        self.tiers, self._config = tiers, config
        self._decoder = Decoder(tiers)
        self._bounds, self._ranks = BoundsWatch(config), RankWatch()
        self._missing = Missing()
        self._looks: deque[Look] = deque()
        self.rows = Rows(2 * config.check_every + SPARE_ROWS, MOST_ROWS)
        # A run that goes on has learned what it was before.
        self._taught = False
        # Up to which step everything is known that will ever be.
        self._known = 0
        self._folder: Path | None = None
        self._start_is_kept = False
        # The newest value of every number that is not one a layer.
        self.latest: dict[str, float] = {}

    # -- looks -------------------------------------------------------------------------------------------

    def look(self, step: int, norms: Norms | None, heard: Any) -> None:
        """Let the tiers look at a step; what they find is on its way then."""
        self._send(self.tiers.look(step, norms, heard))

    def look_at_end(self, step: int) -> list[Event]:
        """Look at the weights once more, if a run that ends has not since its start; and say so."""
        if not self.tiers.schedule.missed_third_tier(step):
            return []
        look = self.tiers.look_at_end(step)
        self._send(look)
        return [] if look is None else [lifecycle.tier3_at_end(step, self._config.tier3_every)]

    def rest(self, step: int) -> None:
        """Send what was gathered since the last look of a run that ends."""
        self._send(self.tiers.rest(step))

    def _send(self, look: Look | None) -> None:
        if look is not None:
            self._looks.append(look)

    def arrive(self, now: int, *, until: int = 0, last: bool = False) -> tuple[list[Event], list[Reading]]:
        """Take in the looks that have arrived; the events and readings that they make.

        Args:
            now: the step that training is at.
            until: looks up to this step are waited for, as far as this process can.
            last: the run ends: all are.
        """
        events: list[Event] = []
        readings: list[Reading] = []
        while self._looks:
            look = self._looks[0]
            if not (last or look.step <= until or look.packet.ready):
                break
            own = look.packet.arrays()
            others = self._others(look, own, now, last=last)
            if others is None:
                break
            self._looks.popleft()
            if self.tiers.company.rank == 0 or self.tiers.company.size == 1:
                decoded = self._decoder.decode(look, own, others)
                events += self._judge(look.step, decoded)
                readings += self._rated(decoded.readings, look.step)
            self._known = look.step
        return events, readings

    def _others(
        self, look: Look, own: Mapping[str, NDArray[np.float64]], now: int, *, last: bool
    ) -> list[Mapping[str, NDArray[np.float64]]] | None:
        """What the other ranks found at the same step; ``None`` while that is still to come."""
        company = self.tiers.company
        if company.alone or not look.asks:
            return []
        if company.rank > 0:
            tells = EACH | SHARES if self.tiers.layers.together else EACH
            told = {name: array for name, array in own.items() if name.split("/")[0] in tells}
            company.tell(look.step, told)
            return []
        found = company.hear(look.step, now, last=last)
        if found is None and last:
            company.give_up()
        return [] if company.alone else found

    def _judge(self, step: int, decoded: Decoded) -> list[Event]:
        """What bounds and ranks have to say to it."""
        events = self._missing.tell(step, decoded.missing)
        if decoded.looked and step == self.tiers.schedule.first and not self._taught:
            self._find_out(decoded.readings[-1].layers.get(RANK, {}))
        for reading in decoded.readings:
            values = {name: reading.scalars[name] for name in BOUNDED if name in reading.scalars}
            drifts = reading.layers.get(DRIFT, {})
            values |= {f"{DRIFT}/{layer}": drift for layer, drift in drifts.items()}
            for layer, rank in reading.layers.get(RANK, {}).items():
                if self.tiers.weights.is_key(layer):
                    values[f"{RANK}/{layer}"] = rank
            errors = {one: reading.scalars[f"{one}_se"] for one in values if f"{one}_se" in reading.scalars}
            events += self._bounds.check(reading.step, values, errors)
        if decoded.outliers is not None:
            events += self._ranks.check_gradients(step, decoded.outliers)
        if decoded.divergences is not None:
            events += self._ranks.check_replicas(step, decoded.divergences)
        if step == self.tiers.schedule.at_end and decoded.looked:
            events.append(lifecycle.tier3_at_end(step, self._config.tier3_every))
        return events

    def _find_out(self, ranks: Mapping[str, float]) -> None:
        """Which layers start at random weights, by their stable ranks before training."""
        weights, given = self.tiers.weights, self._config.pretrained
        if given is None:
            self._bounds.fresh = weights.fresh(ranks)
        else:
            self._bounds.fresh = frozenset() if given else frozenset(weights.layers.names)

    def _rated(self, readings: Sequence[Reading], step: int) -> list[Reading]:
        """The readings with the number of warnings, where bounds were looked at; and their rows."""
        rated = []
        looked = self.tiers.schedule.second_tier(step) or self.tiers.schedule.third_tier(step)
        for reading in readings:
            if ENTROPY in reading.scalars or (looked and reading.step == step):
                scalars = {**reading.scalars, WARNINGS: float(self._bounds.active + self._ranks.active)}
                reading = Reading(reading.step, scalars, reading.layers, reading.labels)
            self.rows.add(reading.step, reading.flat())
            if looked and reading.step == step:
                # The noise scale is a number at one look and a bound at the next: never both.
                self.latest = {name: v for name, v in self.latest.items() if not name.startswith(NOISE)}
            self.latest |= {name: v for name, v in reading.scalars.items() if name.startswith("health/")}
            rated.append(reading)
        return rated

    def known_until(self, step: int) -> int:
        """Up to which step rows are whole, given that checks have come up to ``step``."""
        late = len(self.rows) > self._config.check_every + SPARE_ROWS
        return min(step, self._known) if self._looks and not late else step

    def follow(self, layers: Layers) -> None:
        """Go on with changed layers; what is still on its way belongs to the old ones and is dropped."""
        self._looks.clear()
        self.tiers.follow(layers)
        # The weights of new layers belong to where training began too.
        self._start_is_kept = self.tiers.weights.no_drift is not None

    # -- where training began ----------------------------------------------------------------------------

    def begin(self, folder: Path | None, *, goes_on: bool) -> None:
        """Before the first step is looked at: read where training began, if the run goes on from one.

        Args:
            folder: of the record, if there is one.
            goes_on: this is not the run's first start.
        """
        self._folder = folder
        if goes_on and not self._taught:
            self._bounds.learn({}, [])
        if not self.tiers.reads_model:
            return
        if not goes_on:
            if folder is not None:
                self._start_file.unlink(missing_ok=True)  # of a run that this one replaces
            return
        self._start_is_kept = True
        if self._config.drift == "off":
            return
        weights = self.tiers.weights
        reason = lifecycle.NO_RECORD if folder is None else read_start(weights.drift, self._start_file)
        if reason is not None:
            weights.without_start(reason)

    @property
    def _start_file(self) -> Path:
        assert self._folder is not None
        return start_file(self._folder, self.tiers.company.rank)

    def keep_start(self) -> None:
        """Put the first weights beside the record, once they are known.

        Raises:
            OSError: it cannot be written. It is not tried again.
        """
        if self._start_is_kept or self.tiers.schedule.first is None or not self.tiers.reads_model:
            return
        self._start_is_kept = True
        if self._folder is not None and self._folder.is_dir() and self._config.drift != "off":
            keep_start(self.tiers.weights.drift, self._start_file)

    def learn(self, run: Run, step: int) -> None:
        """Learn again from the record of the run that goes on from ``step``."""
        if step == 0:
            return  # it begins again: what training began from is still to be seen
        self._taught = True
        first: dict[str, float] = {}
        # What was first seen after an earlier resume was not seen before training.
        resumes = [event.from_step for event in run.events if event.event == "run_resumed"]
        began = min([step, *(one for one in resumes if isinstance(one, int))])
        for name, values in run.metrics.items():
            if name in BOUNDED or name.startswith(f"{RANK}/"):
                known = values[(run.metrics["step"] <= began) & ~np.isnan(values)]
                if known.size:
                    first[name] = float(known[0])
        self._find_out({name.removeprefix(f"{RANK}/"): v for name, v in first.items() if name not in BOUNDED})
        events = [event for event in run.events if event.step <= step and not event.superseded]
        self._bounds.learn(first, events)
        self._missing.learn(events)
        if "train/loss" in run.metrics:
            losses = run.metrics["train/loss"][run.metrics["step"] <= step]
            for loss in losses.tolist():
                self._decoder.losses.note(loss)

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the first weights, as plain numbers and lists."""
        outputs = self.tiers.outputs
        return {
            "bounds": self._bounds.state_dict(),
            "ranks": self._ranks.state_dict(),
            "losses": self._decoder.losses.state_dict(),
            "tokens": outputs.tokens.state_dict(),
            "entropy": outputs.entropy.state_dict(),
            "noise": self.tiers.noise.scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; where it is none, nothing is changed.

        Raises:
            KeyError, TypeError, ValueError, IndexError, AttributeError: it is none.
        """
        before = self.state_dict()
        try:
            self._load(state)
            self._taught = True
        except Exception:
            self._load(before)
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        outputs = self.tiers.outputs
        self._bounds.load_state_dict(state["bounds"])
        self._ranks.load_state_dict(state["ranks"])
        self._decoder.losses.load_state_dict(state["losses"])
        outputs.tokens.load_state_dict(state["tokens"])
        outputs.entropy.load_state_dict(state["entropy"])
        self.tiers.noise.scale.load_state_dict(state["noise"])
