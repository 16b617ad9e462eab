"""What somebody should look at, from a run's own numbers: each alert with its evidence and what to do.

Pure: the same stream of steps, evaluations and readings of the machine gives the same alerts, so recorded runs can be
judged as well. A healthy run must raise none; all thresholds are many times what chance brings about, and an alert is
said once, or again only after a while.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tunesmith.errors import listed
from tunesmith.train.events import Alert, Evaluation, Routers, Step

WINDOW, LEAST, SHORT = 64, 24, 8
"""Steps that a step is held against, how many of them there must be, and how many in a row tell a new level."""
SPIKE = 8.0
"""Times the spread of the window, by which a loss must exceed its median."""
EXPLODING, DEAD = 100.0, 1e-3
"""Times the usual gradient norm."""
WORSE = 0.03
"""Share by which a held-out loss must exceed the lowest one, in two evaluations in a row, to have risen."""
STARVED = 0.25
"""Share of the time that the device waits for data."""
SLOW = 1.5
"""Times what the others take."""
COLLAPSED = 0.5
"""Share of the experts that a router used at first, as their shares count, below which it has collapsed."""
AGAIN, MOST = 100, 20
"""Steps until the same alert is raised again, and how often at all."""
READINGS = 3
"""In a row that must say the same of the machine."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Of the machines that a run is on, now and then."""

    host_available: int
    """Bytes, on the host of the first rank."""
    host_total: int
    hot: Mapping[int, str]
    """By rank, how a GPU that is slowed down by its temperature or power supply stands: `91 °C, thermal slowdown`."""
    seconds: Sequence[float] = ()
    """What each rank takes for the same small work; nothing where there is one."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Of some steps in a row."""

    loss: float
    highest: float
    spread: float
    step: int


class Alerts:
    """Told of everything in order; says what each of it means."""

    def __init__(self, *, judges_loss: bool = True, clip: float | None = None):
        """`judges_loss`: not where the loss is of the model's own answers, and its course says nothing."""
        self._judges_loss, self._clip = judges_loss, clip
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._waits: deque[tuple[float, float]] = deque(maxlen=2 * SHORT)
        self._first: list[float] = []
        """The first losses, and the held-out one before them."""
        self._best: _Level | None = None
        self._usual_norm = 0.0
        self._evaluations: list[tuple[int, float, float | None]] = []
        """Steps done, held-out loss, and the level of the training loss then."""
        self._said: dict[str, tuple[int, int]] = {}
        """When an alert was raised last, and how often."""
        self._readings: deque[Reading] = deque(maxlen=READINGS)
        self._first_routers: Routers | None = None
        self._fallen: set[int] = set()
        """Layers whose routers had collapsed when they were looked at last."""

    def see(self, event: Step | Evaluation | Routers) -> list[Alert]:
        if isinstance(event, Routers):
            alerts = [self._collapsed(event)]
        else:
            alerts = self._see_step(event) if isinstance(event, Step) else self._see_evaluation(event)
        return [alert for alert in alerts if alert is not None]

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """What a run that goes on has logged before."""
        for record in records:
            kind = {Step.kind: Step, Evaluation.kind: Evaluation, Routers.kind: Routers}.get(record["event"])
            if kind is not None:
                names = {field.name for field in fields(kind)}
                values = {name: value for name, value in record.items() if name in names}
                self.see(kind(**values))

    # Steps

    def _see_step(self, step: Step) -> list[Alert | None]:
        if not step.is_warm_up:
            self._waits.append((step.waited, step.seconds))
        if step.skipped:
            return [self._starved(step.step)]
        alerts = [self._spike(step), self._diverged(step), self._exploding(step), self._dead(step)]
        alerts.append(self._starved(step.step))
        self._losses.append(step.loss)
        self._norms.append(step.grad_norm)
        if len(self._norms) >= LEAST:
            self._usual_norm = max(self._usual_norm, statistics.median(self._norms))
        return alerts

    def _spike(self, step: Step) -> Alert | None:
        if not self._judges_loss or len(self._losses) < LEAST:
            return None
        usual, spread = median_and_spread(self._losses)
        is_high = step.loss > usual + SPIKE * spread and step.loss > 1.2 * max(self._losses)
        if is_high and min(self._losses) > 0:  # losses of single long-tailed batches are even on a log scale
            usual_log, spread_log = median_and_spread([math.log(loss) for loss in self._losses])
            is_high = math.log(step.loss) > usual_log + 0.75 * SPIKE * spread_log
        if not is_high:
            return None
        return self._raise(
            step.step,
            "loss spike",
            f"The loss of step {step.step} is {step.loss:.4g}; the {len(self._losses)} steps before have a median of "
            f"{usual:.4g} and never exceed {max(self._losses):.4g}.",
            "See which records it had: in `tunesmith ui`, click on that step of the loss. Where they are bad, leave "
            "them out and branch from the checkpoint before; where all are high, a lower learning_rate helps.",
            again=SHORT,
        )

    def _diverged(self, step: Step) -> Alert | None:
        if not self._judges_loss:
            return None
        if len(self._first) < 2:
            self._first.append(step.loss)
        recent = [*self._losses, step.loss][-SHORT:]
        if len(recent) < SHORT:
            return None
        now = statistics.median(recent)
        best = self._best
        if best is None or now < best.loss:
            spread = median_and_spread([*self._losses, step.loss])[1]
            self._best = _Level(now, max(recent), spread, step.step)
        before = max(self._first)
        is_worse = min(recent) > 1.5 * before + 1
        if best is not None and step.step >= best.step + SHORT and not is_worse:
            rise = max(0.5 * abs(best.loss), 0.3, 6 * best.spread)
            is_worse, before = min(recent) > max(best.loss + rise, best.highest), best.loss
        if not is_worse:
            return None
        return self._raise(
            step.step,
            "divergence",
            f"The last {SHORT} losses, up to step {step.step}, are {min(recent):.4g} or more, where the run had been "
            f"at {before:.4g}.",
            f"Stop it, and start again from an earlier checkpoint with a lower learning_rate (it is "
            f"{step.learning_rate:g}), a longer warmup, or cleaner data.",
        )

    def _exploding(self, step: Step) -> Alert | None:
        if len(self._norms) < LEAST:
            return None
        usual = statistics.median(self._norms)
        if not 0 < EXPLODING * usual < step.grad_norm:
            return None
        clipped = f" It was clipped to {self._clip:g}." if self._clip else " Nothing clips it: set max_grad_norm: 1."
        return self._raise(
            step.step,
            "exploding gradients",
            f"The gradient norm of step {step.step} is {step.grad_norm:.3g}, {step.grad_norm / usual:,.0f} times the "
            f"median of the steps before, {usual:.3g}.{clipped}",
            "One such step is often a bad record: look at those of that step. Where it comes again, lower "
            "learning_rate.",
        )

    def _dead(self, step: Step) -> Alert | None:
        norms = [*self._norms, step.grad_norm][-SHORT:]
        has_learned = self._judges_loss and step.loss <= max(0.05, 0.1 * max(self._first, default=0.0))
        if has_learned or not self._judges_loss or len(norms) < SHORT or max(norms) > DEAD * self._usual_norm:
            return None
        return self._raise(
            step.step,
            "dead gradients",
            f"The gradient norms of the last {SHORT} steps, up to step {step.step}, are {max(norms):.3g} at most, and "
            f"had been about {self._usual_norm:.3g}, while the loss is still {step.loss:.4g}.",
            "Little is learned any more. Look at the weights that were trained: a learning_rate that was too high, or "
            "precision: fp16, can leave units that never answer; go back to an earlier checkpoint with a lower one.",
        )

    def _starved(self, step: int) -> Alert | None:
        seconds = sum(seconds for _, seconds in self._waits)
        waited = sum(waited for waited, _ in self._waits)
        if len(self._waits) < SHORT or seconds < 1.0 or waited <= STARVED * seconds:
            return None
        return self._raise(
            step,
            "data starvation",
            f"Of the {seconds:.1f} s of the last {len(self._waits)} steps, {waited:.1f} s ({waited / seconds:.0%}) "
            "were spent waiting for the loader.",
            "Put TUNESMITH_CACHE on a faster disk with room in the page cache, and leave a CPU core free for the "
            "loader.",
        )

    # Evaluations

    def _see_evaluation(self, evaluation: Evaluation) -> list[Alert | None]:
        if not self._judges_loss:
            return []
        if evaluation.step == 0:
            self._first.append(evaluation.loss)
        training = statistics.median(self._losses) if len(self._losses) >= SHORT else None
        self._evaluations.append((evaluation.step, evaluation.loss, training))
        return [self._overfits()]

    def _overfits(self) -> Alert | None:
        if len(self._evaluations) < 3:
            return None
        at, best, then = min(self._evaluations, key=lambda evaluation: evaluation[1])
        (before, first, _), (step, last, now) = self._evaluations[-2:]
        has_risen = before > at and first > best * (1 + WORSE) and last > max(first, best * (1 + 2 * WORSE))
        if not has_risen or then is None or now is None or not now < then:
            return None
        return self._raise(
            step,
            "overfitting",
            f"The held-out loss was lowest after step {at} ({best:.4f}) and has risen since, to {first:.4f} and "
            f"{last:.4f}, while the training loss fell from {then:.4f} to {now:.4f}.",
            f"The best checkpoint is that of step {at} or near it. Train for fewer epochs (stop_when ends a run at "
            "that point), on more data, or with a lower learning_rate or lora.rank.",
        )

    # Routers

    def _collapsed(self, event: Routers) -> Alert | None:
        """Twice in a row, against the first time: single steps have few documents, of few kinds."""
        if self._first_routers is None or self._first_routers.layers != event.layers:
            self._first_routers = event
            return None
        before = dict(zip(event.layers, map(_used, self._first_routers.shares), strict=True))
        now = dict(zip(event.layers, map(_used, event.shares), strict=True))
        fallen = {layer for layer in now if now[layer] < COLLAPSED * before[layer]}
        both, self._fallen = fallen & self._fallen, fallen
        if not both:
            return None
        worst = min(both, key=lambda layer: now[layer] / before[layer])
        return self._raise(
            event.step,
            "collapsed routers",
            f"In {len(both)} of {len(now)} layers with experts the tokens of step {event.step} go to less than half as "
            f"many experts as at first: in layer {worst} to about {now[worst]:.1f}, and {before[worst]:.1f} then.",
            "The other experts are no longer trained or used. Set router_aux_loss_coef (0.001 to 0.01 is usual), lower "
            "learning_rate, or train adapters, which leave the routers as they are.",
        )

    # The machine, and what the trained weights do

    def see_machine(self, step: int, reading: Reading) -> list[Alert]:
        self._readings.append(reading)
        if len(self._readings) < READINGS:
            return []
        alerts = (self._host_memory(step), self._hot(step), self._slow_rank(step))
        return [alert for alert in alerts if alert is not None]

    def _host_memory(self, step: int) -> Alert | None:
        if any(reading.host_available > min(0.05 * reading.host_total, 4 * 2**30) for reading in self._readings):
            return None
        left, total = (size / 2**30 for size in (self._readings[-1].host_available, self._readings[-1].host_total))
        return self._raise(
            step,
            "host memory",
            f"{left:.1f} GiB of this machine's {total:.0f} GiB of memory are left; at zero the system ends the run.",
            "End other programs; what a kill costs is what came after the last checkpoint. In a new run, less offload "
            "to host memory and fewer ranks on this machine take less.",
        )

    def _hot(self, step: int) -> Alert | None:
        always = set.intersection(*(set(reading.hot) for reading in self._readings))
        if not always:
            return None
        said = listed(f"GPU of rank {rank}: {self._readings[-1].hot[rank]}" for rank in sorted(always))
        return self._raise(
            step,
            "GPU slowed down",
            f"Its clocks are lowered to protect it ({said}), in {READINGS} readings in a row.",
            "Look at its cooling and power supply; until then all ranks go at its pace.",
        )

    def _slow_rank(self, step: int) -> Alert | None:
        slow: set[int] | None = None
        for reading in self._readings:
            usual = statistics.median(reading.seconds) if len(reading.seconds) > 1 else math.inf
            if len(reading.seconds) == 2:  # the median lies between them
                usual = min(reading.seconds)
            here = {rank for rank, seconds in enumerate(reading.seconds) if seconds > SLOW * usual}
            slow = here if slow is None else slow & here
        if not slow:
            return None
        seconds = self._readings[-1].seconds
        said = listed(f"rank {rank} takes {seconds[rank] / min(seconds):.1f} times as long" for rank in sorted(slow))
        return self._raise(
            step,
            "slow rank",
            f"For the same work {said} as the fastest, in {READINGS} readings in a row.",
            "All ranks wait for the slowest. Look at what else runs on its machine, at its clocks and its cooling, or "
            "leave it out.",
        )

    def see_unmoved(self, step: int, unmoved: Sequence[str], count: int) -> list[Alert]:
        """Of so many trained tensors, those whose sample is what it was, after many steps. Where that is all of them,
        it is the learning rate (`vitals`)."""
        if not unmoved or len(unmoved) == count:
            return []
        alert = self._raise(
            step,
            "frozen tensors",
            f"{len(unmoved)} of {count} trained tensors have not moved at all up to step {step}: "
            f"{listed(unmoved, most=5)}.",
            "They have no influence on the loss, or no gradient reaches them: take them out of lora.targets, or look "
            "at why the model does not use them.",
        )
        return [alert] if alert is not None else []

    def _raise(self, step: int, name: str, evidence: str, advice: str, *, again: int = AGAIN) -> Alert | None:
        last, count = self._said.get(name, (-(10**9), 0))
        if step < last + again or count >= MOST:
            return None
        self._said[name] = (step, count + 1)
        return Alert(step, name, evidence, advice)


def _used(shares: Sequence[float]) -> float:
    """How many experts are in use, each as far as its share goes: the exponential of the shares' entropy."""
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """The median, and the standard deviation that its median distance stands for: neither heeds a few that are far."""
    values = list(values)
    middle = statistics.median(values)
    return middle, 1.4826 * statistics.median(abs(value - middle) for value in values)
