"""What a training run looks like: lines that change at the bottom of a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tunesmith.cli import output
from tunesmith.errors import UserError, listed

if TYPE_CHECKING:
    from tunesmith.plan.plan import Plan
    from tunesmith.train import events

MICRO_BATCHES = "micro-batches"
"""As `train.loop` calls progress inside a step."""
TRAINING = "Training"
BAR = 20
"""Columns of the bar, where there is room."""
LONG = 10.0
"""Seconds after which a log says what goes on between two steps."""
SPARSEST = 60.0
"""Seconds between two lines of a log, at most while a step lasts no longer."""


class Display:
    """Shows stages, the plan and events. Everything it shows is in the event log too, so nothing depends on it."""

    def __init__(self, said: set[str] | None = None) -> None:
        """`said`: the warnings and notes of the runs of a sweep that came before, which are not shown again."""
        from tunesmith.train.speed import Speed

        self.is_live = output.is_screen(output.stdout())
        self._said = said
        self._stage = ""
        self._stage_began = 0.0
        self._done = 0
        self._total: int | None = None
        self._micro_batch: tuple[int, int] | None = None
        self._is_training = False
        self._began = time.monotonic()
        self._step = self._first_step = 0
        self._total_steps = 0
        self._facts: list[str] = []
        self._speed = Speed()
        self._between_steps = 0.0
        self._last_line = float("-inf")
        self._last_evaluation: float | None = None

    def __enter__(self) -> Display:
        if self.is_live:
            output.show_at_bottom(output.stdout(), self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        output.clear_bottom()

    def stage(self, name: str) -> None:
        """Something without steps to count is going on."""
        self.progress(name, 0, None)

    def progress(self, name: str, done: int, total: int | None) -> None:
        if name == MICRO_BATCHES:
            self._micro_batch = (done + 1, total) if total and total > 1 else None
            name, done, total = TRAINING, self._step, self._total_steps
        is_new = name != self._stage
        self._stage, self._done, self._total = name, done, total
        now = time.monotonic()
        if is_new:
            self._stage_began = now
            if self.is_live:
                output.refresh_bottom()
        if self.is_live:
            return
        if not self._is_training:
            if is_new:
                output.say(name)
        elif name == TRAINING:
            if self._micro_batch and now - self._last_line >= SPARSEST:
                self._line(f"step {self._step + 1}/{self._total_steps}: {self._within_step()}")
        else:
            apart = LONG if self._last_line <= self._stage_began else SPARSEST
            if now - max(self._stage_began, self._last_line) < apart:
                return
            self._line(f"{name}{f': {done:,} of {total:,}' if total else ''}")

    def show_plan(self, plan: Plan) -> None:
        rows = [(reason.topic, reason.choice, reason.why) for reason in plan.reasons]
        output.say(output.table(("plan", "", "why"), rows))

    def show(self, event: events.Event) -> None:
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def _on_started(self, event: events.Started) -> None:
        self._total_steps = event.total_steps
        self._is_training = True
        self._began = time.monotonic()
        self.progress(MICRO_BATCHES, 0, None)
        output.say(f"Training {event.trained_parameters:,} parameters for {event.total_steps:,} steps")

    def _on_resumed(self, event: events.Resumed) -> None:
        self._first_step = self._step = event.step
        output.say(f"Continuing after step {event.step}")
        self.progress(MICRO_BATCHES, 0, None)

    def _on_step(self, event: events.Step) -> None:
        self._step = event.step
        self._speed.add(event.tokens, event.seconds, is_warm_up=event.is_warm_up)
        self.progress(MICRO_BATCHES, 0, None)
        speed = self._speed.now
        self._facts = [
            f"loss {event.loss:.4f}",
            *_figures(event.figures),
            "warming up" if speed is None else f"{speed:,.0f} tokens/s",
            output.readable_bytes(event.memory),
            *(["overflow: step skipped"] if event.skipped else []),
        ]
        if self.is_live:
            return
        now = time.monotonic()
        apart = min(SPARSEST, max(1.0, (now - self._began) / 50))  # a log of a long or fast run stays readable
        if now - self._last_line >= apart or event.step == self._total_steps:
            where = (f"step {event.step}/{self._total_steps}", f"epoch {event.epoch:.2f}")
            self._line("  ".join([*where, *self._facts, *self._times()]))

    def _on_compiled(self, event: events.Compiled) -> None:
        output.say(f"Compiling layers took {event.seconds:.0f} s; the next run like this one finds most of it done")

    def _on_evaluation(self, event: events.Evaluation) -> None:
        parts = [f"held-out loss {event.loss:.4f}"]
        if self._last_evaluation is not None:
            parts.append(f"({event.loss - self._last_evaluation:+.4f})")
        parts += _figures(event.figures)
        if len(event.losses) > 1:
            each = (
                " ".join([f"{title} {loss:.4f}", *_figures(event.figures_of.get(title, {}))])
                for title, loss in event.losses.items()
            )
            parts.append(listed(each, "; "))
        parts += [f"\n  {title}: {_scores(found)}" for title, found in event.tasks.items()]
        self._last_evaluation = event.loss
        if event.step > self._first_step:
            self._between_steps += event.seconds
        output.say(f"step {event.step}: {' '.join(parts)}")

    def _on_checkpoint(self, event: events.Checkpointed) -> None:
        if not self.is_live:
            output.say(f"step {event.step}: saved")

    def _on_warning(self, event: events.Warned) -> None:
        if self._is_new(event.message):
            output.warn(event.message)

    def _on_note(self, event: events.Noted) -> None:
        if self._is_new(event.message):
            output.say(event.message)

    def _is_new(self, message: str) -> bool:
        if self._said is None:
            return True
        is_new = message not in self._said
        self._said.add(message)
        return is_new

    def _on_alert(self, event: events.Alert) -> None:
        if not event.is_fatal:
            output.warn(f"{event.name}: {event.evidence} {event.advice}")

    def _on_stopping(self, event: events.Stopping) -> None:
        again = " again" if "Ctrl-C" in event.reason else ""
        output.say(f"Stopping: what has been trained is saved first. Ctrl-C{again} stops at once, without saving.")

    def _on_stopped(self, event: events.Stopped) -> None:
        output.say(f"step {event.step}: {event.reason}")

    def _on_finished(self, event: events.Finished) -> None:
        steps = event.step - self._first_step
        spent = dict(event.spent)
        training = spent.pop("training", event.seconds)
        output.say(
            f"{steps} steps in {clock(training)}, {event.tokens_per_second:,.0f} tokens/s "
            f"(predicted {event.predicted_tokens_per_second:,.0f})"
        )
        rest = [f"{name} {clock(seconds)}" for name, seconds in spent.items() if seconds >= 0.5]
        if rest:
            output.say(f"{clock(event.seconds)} in all: training {clock(training)}, {', '.join(rest)}")
        measured, predicted = (output.readable_bytes(n) for n in (event.measured_memory, event.predicted_memory))
        output.say(f"Peak memory {measured} (predicted {predicted})")
        parts = [
            f"{name} {output.readable_bytes(found)} (predicted {output.readable_bytes(expected)})"
            for name, (expected, found) in event.memory.items()
        ]
        if parts:
            output.say(f"of which {', '.join(parts)}")

    def _line(self, text: str) -> None:
        """One of those that a log has many of."""
        self._last_line = time.monotonic()
        output.say(text)

    def _within_step(self) -> str:
        assert self._micro_batch
        return f"micro-batch {self._micro_batch[0]}/{self._micro_batch[1]}"

    def _times(self) -> list[str]:
        """How long the steps and what is between them have gone on, and how long they will."""
        elapsed = f"{clock(time.monotonic() - self._began)} elapsed"
        if self._speed.step_seconds is None:
            return [elapsed]
        between = self._between_steps / max(1, self._step - self._first_step)
        left = (self._total_steps - self._step) * (self._speed.step_seconds + between)
        return [elapsed, f"{clock(left)} left"]

    # The lines at the bottom

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Pieces are never cut: those that do not fit begin a new line."""
        name = output.spinning(self._stage or "Looking at the model and the data", console, options)
        first = [name, *self._counts(options)]
        second = [Text(piece) for piece in [*self._facts, *self._times()]] if self._is_training else []
        lines = list(_flow([*first, *second], options.max_width))
        if len(lines) > 1:
            lines = [*_flow(first, options.max_width), *_flow(second, options.max_width)]
        for number, line in enumerate(lines):
            yield Text("  " if number else "").append_text(line)

    def _counts(self, options: ConsoleOptions) -> Iterator[Text]:
        """How far of how much; nothing where that is not known."""
        if self._total:
            full, empty = ("#", "-") if options.ascii_only else ("\u2501", "\u2500")
            filled = round(BAR * min(1.0, self._done / self._total))
            if options.max_width >= 3 * BAR:
                yield Text.assemble((full * filled, "green"), (empty * (BAR - filled), "dim"))
        if self._is_training:
            step = self._step + 1 if self._micro_batch and self._stage == TRAINING else self._step
            yield Text(f"step {step:,}/{self._total_steps:,}")
        if self._stage == TRAINING:
            if self._micro_batch:
                yield Text(self._within_step())
        elif self._total:
            yield Text(f"{self._done:,} of {self._total:,}")
        elif self._done:
            yield Text(f"{self._done:,}")


SHOWN_FIGURES = {
    "accuracy": "accuracy {:.0%}",
    "f1": "F1 {:.3f}",
    "margin": "margin {:.3f}",
    "reward": "reward {:.3f}",
    "answer_tokens": "{:.0f} tokens an answer",
    "truncated": "{:.0%} cut off",
    "kl": "KL {:.3f}",
}
"""Of what objectives report, those that say most; the others are in the event log."""


def _figures(figures: Mapping[str, float]) -> list[str]:
    return [form.format(figures[name]) for name, form in SHOWN_FIGURES.items() if name in figures]


def _scores(found: Mapping[str, events.Score]) -> str:
    """Of a task: a share is a percentage, with its interval of 95%."""
    shown = []
    for name, (value, low, high) in found.items():
        interval = "" if low is None or high is None else f" ({low:.1%} to {high:.1%})"
        shown.append(f"{name} {value:.4f}" if "loss" in name else f"{name} {value:.1%}{interval}")
    return ", ".join(shown)


def _flow(pieces: list[Text], width: int) -> Iterator[Text]:
    """Lines that have room for two spaces in front of each."""
    line = Text()
    for piece in pieces:
        if line and line.cell_len + 2 + piece.cell_len > width - 3:
            yield line
            line = Text()
        piece.truncate(width - 3, overflow="ellipsis")
        line = line.append("  ").append_text(piece) if line else piece.copy()
    if line:
        yield line


class Silent(Display):
    """Of a rank that has nothing to say: the first one says it all."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, name: str, done: int, total: int | None) -> None:
        pass


def read_plan_file(path: Path) -> Plan:
    import json

    from tunesmith.plan.plan import Plan, first_problem, upgraded

    try:
        plan = Plan.model_validate(upgraded(json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise UserError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a plan: {first_problem(error)}.") from error
    if plan.beyond:
        raise UserError(f"The plan {path} needs what this version cannot do: {listed(plan.beyond)}.")
    return plan


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
