"""What a training run looks like: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tunesmith.cli import output
from tunesmith.errors import UserError

if TYPE_CHECKING:
    from tunesmith.plan.plan import Plan
    from tunesmith.train import events

SMOOTHING = 0.7
"""Weight of the past in the speed shown."""


class Display:
    """Shows stages, the plan and events. Everything it shows is in the event log too, so nothing depends on it."""

    def __init__(self) -> None:
        self.is_live = output.stdout().is_terminal
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Count(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=output.stdout(),
            disable=not self.is_live,
            transient=True,
        )
        self._task = None
        self._stage = ""
        self._total_steps = 0
        self._first_step = 0
        self._speed: float | None = None
        self._seconds_left: float | None = None
        self._last_line = 0.0
        self._last_evaluation: float | None = None

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Something without steps to count is going on."""
        self.progress(name, 0, None)

    def progress(self, name: str, done: int, total: int | None) -> None:
        if self.is_live:
            self._progress(name, done, total, "")
        elif name != self._stage:
            output.say(name)
        self._stage = name

    def show_plan(self, plan: Plan) -> None:
        rows = [(reason.topic, reason.choice, reason.why) for reason in plan.reasons]
        output.say(output.table(("plan", "", "why"), rows))

    def show(self, event: events.Event) -> None:
        handler = getattr(self, f"_{event.kind}", None)
        if handler is not None:
            handler(event)

    def _started(self, event: events.Started) -> None:
        self._total_steps = event.total_steps
        output.say(f"Training {event.trained_parameters:,} parameters for {event.total_steps:,} steps")
        self._stage = "Training"
        self._progress("Training", 0, event.total_steps, "")

    def _resumed(self, event: events.Resumed) -> None:
        self._first_step = event.step
        output.say(f"Continuing after step {event.step}")
        self._progress("Training", event.step, self._total_steps, "")

    def _step(self, event: events.Step) -> None:
        speed = event.tokens / max(event.seconds, 1e-9)
        self._speed = speed if self._speed is None else SMOOTHING * self._speed + (1 - SMOOTHING) * speed
        left = event.seconds * (self._total_steps - event.step)
        past = self._seconds_left
        self._seconds_left = left if past is None else SMOOTHING * (past - event.seconds) + (1 - SMOOTHING) * left
        facts = f"loss {event.loss:.4f}  {self._speed:,.0f} tokens/s  {output.readable_bytes(event.memory)}"
        if event.skipped:
            facts += "  (overflow: step skipped)"
        if self.is_live:
            self._progress("Training", event.step, self._total_steps, facts)
            return
        now = time.monotonic()
        if now - self._last_line < 1.0 and event.step != self._total_steps:
            return  # a log of a fast run stays readable
        self._last_line = now
        epoch, rest = f"epoch {event.epoch:.2f}", _clock(max(0.0, self._seconds_left))
        output.say(f"step {event.step}/{self._total_steps}  {epoch}  {facts}  {rest} left")

    def _compiled(self, event: events.Compiled) -> None:
        output.say(f"Compiling layers took {event.seconds:.0f} s; the next run like this one finds most of it done")

    def _evaluation(self, event: events.Evaluation) -> None:
        parts = [f"held-out loss {event.loss:.4f}"]
        if self._last_evaluation is not None:
            parts.append(f"({event.loss - self._last_evaluation:+.4f})")
        if len(event.losses) > 1:
            parts.append("; ".join(f"{title} {loss:.4f}" for title, loss in event.losses.items()))
        self._last_evaluation = event.loss
        output.say(f"step {event.step}: {' '.join(parts)}")

    def _checkpoint(self, event: events.Checkpointed) -> None:
        if not self.is_live:
            output.say(f"step {event.step}: saved")

    def _warning(self, event: events.Warned) -> None:
        output.warn(event.message)

    def _stopped(self, event: events.Stopped) -> None:
        output.say(f"step {event.step}: {event.reason}")

    def _finished(self, event: events.Finished) -> None:
        measured, predicted = (output.readable_bytes(n) for n in (event.measured_memory, event.predicted_memory))
        steps = event.step - self._first_step
        output.say(
            f"{steps} steps in {_clock(event.seconds)}, {event.tokens_per_second:,.0f} tokens/s (predicted "
            f"{event.predicted_tokens_per_second:,.0f}); peak memory {measured} (predicted {predicted})"
        )
        parts = [
            f"{name} {output.readable_bytes(found)} (predicted {output.readable_bytes(expected)})"
            for name, (expected, found) in event.memory.items()
        ]
        if parts:
            output.say(f"of which {', '.join(parts)}")

    def _progress(self, name: str, done: int, total: int | None, facts: str) -> None:
        if not self.is_live:
            return
        if self._task is None or name != self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total, completed=done, facts=facts)
        else:
            self._bar.update(self._task, description=name, completed=done, total=total, facts=facts)


class Silent(Display):
    """Of a rank that has nothing to say: the first one says it all."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, name: str, done: int, total: int | None) -> None:
        pass


class _Count(ProgressColumn):
    """How far of how much; nothing where that is not known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


def read_plan_file(path: Path) -> Plan:
    import json

    from tunesmith.plan.plan import Plan, first_problem

    try:
        plan = Plan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a plan: {first_problem(error)}.") from error
    if plan.beyond:
        raise UserError(f"The plan {path} needs what this version cannot do: {', '.join(plan.beyond)}.")
    return plan


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
