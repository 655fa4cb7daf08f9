"""The alarm rule: each layer against its own recent history.

``LayerWatch.check`` takes one check's reading and returns the events it makes. The order matters: presence
first, then the common factor, then each layer's range, then alarms and clearings, and last the baselines,
which only values in range may enter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.watch import common, messages
from palingenesis.watch.baseline import Baseline, matching
from palingenesis.watch.global_level import GlobalLevel
from palingenesis.watch.incidents import Alarmed, describe
from palingenesis.watch.presence import PresenceWatch
from palingenesis.watch.reading import Bools, CheckReading, Floats, Ints

IN_RANGE, NO_GRADIENT, VANISHING, EXPLODING, NEVER_TRAINED = range(5)
DIAGNOSES = ("in_range", "no_gradient", "vanishing", "exploding", "never_trained")

# Checks in a row with one total norm before gradients are said to be clipped.
CLIPPED_CHECKS = 3

# A lasting level may be accepted while it wanders by no more than this many decades (one standard deviation).
LEVEL_SPREAD = 0.5


class LayerWatch:
    """Alarms for layers, all at once.

    Args:
        layers: names.
        config: thresholds.
        units: ``(layer index, parameter name)`` of every parameter or part, for layers in which one
            parameter can be missing while another is there.
        trained: layers that the optimizer holds; only these can be ``never_trained``.
        order: each layer's place in the forward pass; that of ``layers`` if not given.
        raw: the gradients are known to be unclipped.
    """

    def __init__(
        self,
        layers: Sequence[str],
        config: MonitorConfig,
        *,
        units: Sequence[tuple[int, str]] = (),
        trained: Bools | None = None,
        order: Ints | None = None,
        raw: bool = False,
    ) -> None:
        self.layers, self.config, self.units, self.raw = list(layers), config, list(units), raw
        size = len(self.layers)
        self.order = np.arange(size) if order is None else order
        self.trained = np.ones(size, dtype=bool) if trained is None else trained
        self._unit_layer: Ints = np.array([layer for layer, _ in self.units], dtype=np.int64)
        per_layer = np.bincount(self._unit_layer, minlength=size) if self.units else np.zeros(size)
        self._unit_shares = per_layer[self._unit_layer] > 1 if self.units else np.zeros(0, dtype=bool)

        self.baseline = self._new_baseline(size)
        self.presence = PresenceWatch(size, warmup=config.warmup, alpha=config.presence_alpha)
        self.unit_presence = PresenceWatch(len(self.units), warmup=config.warmup, alpha=config.presence_alpha)
        self.level = GlobalLevel(config)
        self.active = np.zeros(size, dtype=np.int64)
        self.active_since = np.zeros(size, dtype=np.int64)
        self.unit_active = np.zeros(len(self.units), dtype=np.int64)
        self.unit_active_since = np.zeros(len(self.units), dtype=np.int64)
        self.judged = 0
        # The norm that gradients are clipped to, once that is certain.
        self.clipped_norm: float | None = None
        self._totals: deque[common.Departure] = deque(maxlen=CLIPPED_CHECKS)
        # Of the last checks: what each layer's value was, and which layers or units lacked a gradient.
        self._departures: deque[common.Departure] = deque(maxlen=config.consecutive)
        self._missing: deque[tuple[Bools, Bools]] = deque(maxlen=config.consecutive)
        self._outside = self._new_baseline(size)
        self._any_outside = True
        self._last_code = np.zeros(size, dtype=np.int64)
        self._incident, self._incident_step, self._incidents = "", 0, 0

    def _new_baseline(self, size: int) -> Baseline:
        config = self.config
        return Baseline(
            size,
            warmup=config.warmup,
            rate_floor=config.baseline_rate_floor,
            reach=float(np.log10(config.factor)),
        )

    # -- one check ---------------------------------------------------------------------------------------

    def check(self, reading: CheckReading) -> list[Event]:
        """Judge one check.

        A check at which no layer at all has a gradient is not judged and changes nothing: the fault is the
        call's place in the loop, or everything is cut off, and the caller says so once.
        """
        if not reading.saw_gradients:
            return []
        missing, unit_missing = self._update_presence(reading)
        departure = self._departure(reading)
        self._departures.append(departure)
        self._missing.append((missing, unit_missing))
        # A layer that never had a gradient is judged too, once the warm-up is over.
        self.judged = int(np.count_nonzero(self.baseline.ready | self.presence.never))

        kind = common.hypothesis(list(self._departures), self.config, raw=self.raw)
        self._totals.append(departure)
        if len(self._totals) == CLIPPED_CHECKS and common.clipped(self._totals, self.config.clip_tolerance):
            self.clipped_norm = departure.total
        code, confirmed = self._conditions(kind)
        self._last_code = code
        events = self.level.check(departure, kind, lambda: self._apart(kind, departure, code))
        cleared = self._clear(reading, code, departure)
        events += self._raise(reading, confirmed, departure, kind)
        events += cleared
        events += self._update_baselines(reading, code, departure, kind)
        return events

    def _update_presence(self, reading: CheckReading) -> tuple[Bools, Bools]:
        self.presence.update(reading.step, reading.layers)
        missing = self.presence.missing()
        if not self.config.absent_gradients:
            missing &= ~reading.absent
        unit_missing = np.zeros(len(self.units), dtype=bool)
        if reading.units is not None:
            self.unit_presence.update(reading.step, reading.units)
            # A layer without any gradient is told once, not once a parameter.
            whole = reading.norm[self._unit_layer] == 0.0
            unit_missing = self.unit_presence.missing() & self._unit_shares & ~whole
        return missing, unit_missing

    def _departure(self, reading: CheckReading) -> common.Departure:
        seen = reading.finite & (reading.norm > 0)
        value = np.full(len(self.layers), np.nan)
        np.log10(reading.norm, out=value, where=seen)
        shift = np.where(self.baseline.ready, value - self.baseline.mean, np.nan)
        finite = reading.norm[reading.finite]
        total = float(np.linalg.norm(finite)) if reading.finite.all() else float("nan")
        return common.Departure(reading.step, shift, self.baseline.std, value, total)

    def _conditions(self, kind: common.Kind) -> tuple[Ints, Ints]:
        """The condition of each layer now, and the one that held on all of the last checks (or in range)."""
        codes = []
        for departure, (missing, _) in zip(self._departures, self._missing, strict=True):
            low, high = common.out_of_range(departure, kind, self.config)
            code = np.zeros(len(self.layers), dtype=np.int64)
            code[low], code[high], code[missing] = VANISHING, EXPLODING, NO_GRADIENT
            codes.append(code)
        now = codes[-1]
        if self.config.from_start:
            now[self.presence.never & self.trained] = NEVER_TRAINED
        steady = np.full(len(self.layers), len(codes) >= self.config.consecutive)
        for code in codes:
            steady &= code == now
        # Never trained is a statement about the whole warm-up: it needs no second check.
        steady |= now == NEVER_TRAINED
        return now, np.where(steady, now, IN_RANGE)

    def _apart(self, kind: common.Kind, departure: common.Departure, code: Ints) -> list[str]:
        """The layers that did not take part in a common move."""
        if kind != "common":
            return []
        factor = common.common_factor(departure, kind)
        with np.errstate(invalid="ignore"):
            apart = np.abs(departure.shift - factor) > self.config.common_mode_spread
        return [self.layers[i] for i in np.flatnonzero(apart | (code != IN_RANGE))]

    @property
    def alarmed(self) -> Bools:
        """Layers with an active alarm."""
        alarmed: Bools = self.active != IN_RANGE
        return alarmed

    @property
    def unconfirmed(self) -> Bools:
        """Layers out of range at the last check for which a second check could still raise an alarm."""
        open_: Bools = (self._last_code != IN_RANGE) & (self._last_code != self.active)
        return open_

    def close(self, step: int) -> list[Event]:
        """What a second check would have had to confirm when the run ended."""
        found = np.flatnonzero(self.unconfirmed)
        told = {self.layers[i]: DIAGNOSES[self._last_code[i]] for i in found}
        return messages.unconfirmed(step, told, self.level.unconfirmed)

    # -- alarms ------------------------------------------------------------------------------------------

    def _raise(
        self, reading: CheckReading, confirmed: Ints, departure: common.Departure, kind: common.Kind
    ) -> list[Event]:
        alarms: list[Event] = []
        told: list[Alarmed] = []
        new = np.flatnonzero((confirmed != IN_RANGE) & (confirmed != self.active))
        factor = common.common_factor(departure, kind)
        first_step = self._departures[0].step
        for i in new:
            self.active[i], self.active_since[i] = confirmed[i], reading.step
            diagnosis = DIAGNOSES[confirmed[i]]
            relative = float(departure.shift[i] - factor)
            alarms.append(
                messages.alarm(
                    self.layers[i],
                    diagnosis,
                    reading,
                    index=int(i),
                    value=float(departure.value[i]),
                    baseline=float(self.baseline.mean[i]) if self.baseline.ready[i] else None,
                    std=float(departure.std[i]),
                    relative=relative,
                    since=first_step if confirmed[i] != NEVER_TRAINED else 1,
                    clipped=kind == "clipped",
                )
            )
            told.append(Alarmed(self.layers[i], int(self.order[i]), diagnosis, abs(relative)))
        for u, diagnosis in self._new_unit_alarms(reading):
            layer, parameter = self.units[u]
            alarms.append(
                messages.parameter_alarm(self.layers[layer], parameter, diagnosis, reading.step, first_step)
            )
            told.append(Alarmed(self.layers[layer], int(self.order[layer]), diagnosis, 0.0))
        return self._as_incident(reading.step, alarms, told)

    def _new_unit_alarms(self, reading: CheckReading) -> list[tuple[int, str]]:
        if reading.units is None:
            return []
        missing = self._missing[-1][1].copy()
        if missing.any():
            for _, unit_missing in self._missing:
                missing &= unit_missing
            missing &= len(self._missing) >= self.config.consecutive
        never = self.unit_presence.never & self._unit_shares
        if not (missing.any() or never.any()):
            return []
        code = np.where(missing, NO_GRADIENT, IN_RANGE)
        if self.config.from_start:
            alive = (reading.norm[self._unit_layer] != 0.0) & self.trained[self._unit_layer]
            code[never & alive] = NEVER_TRAINED
        new = np.flatnonzero((code != IN_RANGE) & (code != self.unit_active))
        self.unit_active[new], self.unit_active_since[new] = code[new], reading.step
        return [(int(u), DIAGNOSES[code[u]]) for u in new]

    def _as_incident(self, step: int, alarms: list[Event], told: list[Alarmed]) -> list[Event]:
        """Give alarms that begin together one id, and one event that names the likely origin."""
        if not alarms or not self.config.incidents:
            return alarms
        checks_apart = [d.step for d in self._departures]
        joins = bool(self._incident) and self._incident_step >= checks_apart[0]
        if not joins and len(alarms) == 1:
            return alarms
        events: list[Event] = []
        if not joins:
            self._incidents += 1
            self._incident, self._incident_step = f"incident-{self._incidents}", step
            events.append(describe(step, self._incident, told, len(self.layers)))
        return events + [messages.with_fields(alarm, incident=self._incident) for alarm in alarms]

    def _clear(self, reading: CheckReading, code: Ints, departure: common.Departure) -> list[Event]:
        events = []
        readable = reading.finite & (self.active != IN_RANGE)
        for i in np.flatnonzero(readable & (code == IN_RANGE)):
            events.append(self._cleared(int(i), reading.step, float(departure.value[i]), "in_range"))
        if reading.units is not None:
            back = (self.unit_active != IN_RANGE) & reading.units.now
            for u in np.flatnonzero(back):
                layer, parameter = self.units[u]
                diagnosis = DIAGNOSES[self.unit_active[u]]
                since = int(self.unit_active_since[u])
                self.unit_active[u] = IN_RANGE
                events.append(
                    messages.alarm_cleared(
                        self.layers[layer], diagnosis, reading.step, since, parameter=parameter
                    )
                )
        return events

    def _cleared(self, i: int, step: int, value: float, reason: str) -> Event:
        diagnosis, since = DIAGNOSES[self.active[i]], int(self.active_since[i])
        self.active[i] = IN_RANGE
        baseline = float(self.baseline.mean[i]) if self.baseline.ready[i] else None
        return messages.alarm_cleared(
            self.layers[i], diagnosis, step, since, value=value, baseline=baseline, reason=reason
        )

    # -- baselines ---------------------------------------------------------------------------------------

    def _update_baselines(
        self, reading: CheckReading, code: Ints, departure: common.Departure, kind: common.Kind
    ) -> list[Event]:
        seen = np.isfinite(departure.value)
        factor = common.common_factor(departure, kind)
        if kind == "common" and factor:
            self.baseline.shift(factor, self.baseline.ready)
        elif kind == "clipped":
            # The level of clipped gradients is clipping's, not the layers': nothing is learned from a
            # check at which one layer's explosion scaled all the others.
            seen &= ~(self.baseline.ready & (abs(factor) > 0))
        self.baseline.update(departure.value, seen & (code == IN_RANGE))
        return self._accept_levels(reading, code, departure, factor if kind == "clipped" else 0.0)

    def _accept_levels(
        self, reading: CheckReading, code: Ints, departure: common.Departure, clipping: float
    ) -> list[Event]:
        outside = (code == VANISHING) | (code == EXPLODING)
        if not (outside.any() or self._any_outside):
            return []
        self._any_outside = bool(outside.any())
        self._outside.count[code == IN_RANGE] = 0
        fresh = outside & (self._outside.count == 0)
        self._outside.mean[fresh], self._outside.var[fresh] = departure.value[fresh], 0.0
        self._outside.update(departure.value, outside)
        if not self.config.level_shift:
            return []
        events = []
        before = self.baseline.mean.copy()
        lasting = outside & (self._outside.count >= self.config.level_shift_checks)
        lasting &= self._outside.std <= LEVEL_SPREAD
        if lasting.any():
            # The culprit's new level holds the others down for as long: theirs is accepted with it.
            self.baseline.shift(clipping, self.baseline.ready)
        for i in np.flatnonzero(lasting):
            old, new = float(before[i]), float(self._outside.mean[i])
            events.append(messages.level_shift(self.layers[i], reading.step, old, new))
            self.baseline.restart(int(i), new, float(self._outside.var[i]))
            self._outside.count[i] = 0
            if self.active[i] != IN_RANGE:
                events.append(
                    self._cleared(int(i), reading.step, float(departure.value[i]), "level_accepted")
                )
        return events

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as plain lists by layer name: loads into a watch over other layers too."""
        return {
            "layers": list(self.layers),
            "units": [[self.layers[layer], parameter] for layer, parameter in self.units],
            "baseline": self.baseline.state_dict(),
            "outside": self._outside.state_dict(),
            "presence": self.presence.state_dict(),
            "unit_presence": self.unit_presence.state_dict(),
            "level": self.level.state_dict(),
            "active": self.active.tolist(),
            "active_since": self.active_since.tolist(),
            "unit_active": self.unit_active.tolist(),
            "unit_active_since": self.unit_active_since.tolist(),
            "incidents": self._incidents,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; layers that it does not know start afresh."""
        source, target = matching(state["layers"], self.layers)
        self.baseline.load(state["baseline"], source, target)
        self._outside.load(state["outside"], source, target)
        self.presence.load(state["presence"], source, target)
        self.active[target] = np.asarray(state["active"], dtype=np.int64)[source]
        self.active_since[target] = np.asarray(state["active_since"], dtype=np.int64)[source]
        known = [tuple(unit) for unit in state["units"]]
        mine = [(self.layers[layer], parameter) for layer, parameter in self.units]
        source, target = matching(known, mine)
        self.unit_presence.load(state["unit_presence"], source, target)
        self.unit_active[target] = np.asarray(state["unit_active"], dtype=np.int64)[source]
        self.unit_active_since[target] = np.asarray(state["unit_active_since"], dtype=np.int64)[source]
        self.level.load_state_dict(state["level"])
        self._incidents = int(state["incidents"])
        self._departures.clear()
        self._missing.clear()

    def band(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log₁₀ norm a layer; NaN where there is no baseline yet."""
        ready = self.baseline.ready
        return np.where(ready, self.baseline.mean, np.nan), np.where(ready, self.baseline.std, np.nan)
