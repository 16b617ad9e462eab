"""What a run looks like in a terminal, where newcomers see it, and in a log."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console

from screen import Terminal
from tunesmith.cli import output
from tunesmith.cli.display import MICRO_BATCHES, Display
from tunesmith.train import events

WARNING = "the data set mine has 12 records without an answer, which are left out; look at them by `tunesmith check`"


@pytest.fixture
def screen(monkeypatch):
    def make(is_terminal: bool) -> tuple[Display, io.StringIO]:
        written = io.StringIO()
        console = Console(file=written, force_terminal=is_terminal, width=160, highlight=False, markup=False)
        monkeypatch.setattr(output, "stdout", lambda: console)
        monkeypatch.setattr(output, "stderr", lambda: console)
        return Display(), written

    return make


@pytest.fixture
def terminal(monkeypatch):
    """Both streams in one terminal, as usual; closed at the end."""
    made: list[Terminal] = []
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def make(columns: int) -> Terminal:
        one = Terminal(columns)
        made.append(one)
        streams = {name: os.fdopen(os.dup(one.theirs), "w", encoding="utf-8") for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            console = Console(file=stream, width=columns, highlight=False, markup=False, emoji=False)
            assert console.is_terminal
            monkeypatch.setattr(output, name, lambda console=console: console)
        return one

    yield make
    output.clear_bottom()
    for one in made:
        one.close()


def step(number: int, seconds: float = 0.5, **changes) -> events.Step:
    return events.Step(number, number / 2, 1.5, 1e-3, 1.0, 64, 20.0, seconds, 2**30, {"mine": 1.5}, **changes)


def run_through(display: Display) -> None:
    display.stage("Starting")
    with display:
        display.progress("Tokenizing mine", 3, None)
        output.refresh_bottom()
        display.progress("Tokenizing mine", 5, 10)
        display.stage("Loading the model")
        display.show(events.Started(total_steps=2, trained_parameters=8, versions={}))
        display.progress("Evaluating", 0, None)
        display.show(events.Evaluation(0, 2.0, {"mine": 2.0}, 5.0, 0.1))
        for number in (1, 2):
            display.progress(MICRO_BATCHES, 1, 4)
            output.refresh_bottom()
            display.show(step(number))
            output.refresh_bottom()
        display.show(events.Checkpointed(2, 0.1))
        display.show(events.Finished(2, 1.0, 64.0, 2**20, 2**20))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_stage_of_a_run_can_be_shown(screen, is_terminal):
    display, written = screen(is_terminal)
    run_through(display)
    text = written.getvalue()
    for expected in ("Tokenizing mine", "Loading the model", "held-out loss 2.0000", "2/2", "loss 1.5000", "1.0 GiB"):
        assert expected in text
    assert ("\x1b[" in text) == is_terminal


def test_a_continued_run_counts_the_steps_of_this_sitting(screen):
    display, written = screen(False)
    display.show(events.Started(total_steps=9, trained_parameters=8, versions={}))
    display.show(events.Resumed(7))
    display.show(events.Finished(9, 1.0, 64.0, 2**20, 2**20))
    assert "\n2 steps in 0:01" in written.getvalue()


def test_memory_by_category_is_shown_where_the_device_tells_it(screen):
    display, written = screen(False)
    display.show(events.Finished(9, 1.0, 64.0, 2**20, 2**20, memory={"activations": (2**21, 2**20)}))
    assert "of which activations 1.0 MiB (predicted 2.0 MiB)" in written.getvalue()


@pytest.mark.parametrize("columns", [40, 72, 100])
def test_lines_fit_the_terminal_and_warnings_have_lines_of_their_own(terminal, columns):
    """As a person sees it: the lines at the bottom once, and everything that was said above them, whole."""
    window = terminal(columns)
    with Display() as display:
        display.show(events.Started(total_steps=12_000, trained_parameters=8, versions={}))
        for number in range(9_997, 9_999):
            display.progress(MICRO_BATCHES, 2, 16)
            display.show(step(number))
            display.show(events.Warned(WARNING))
            display.progress(MICRO_BATCHES, 3, 16)
            output.refresh_bottom()
            lines = window.look(0.05)
            assert sum("Training " in line and "/12,000" in line for line in lines) == 1
        whole = " ".join(line.strip() for line in lines)
        assert whole.count(f"warning: {WARNING}") == 2
        bottom = lines[next(i for i, line in enumerate(lines) if re.search(r"\S Training", line)) :]
        shown = " ".join(bottom)
        for piece in ("step 9,999/12,000", "micro-batch 4/16", "loss 1.5000", "128 tokens/s", "1.0 GiB"):
            assert any(piece in line for line in bottom), f"{piece} is cut in {bottom}"
        assert re.search(r"\d:\d\d elapsed", shown)
        assert re.search(r"\d:\d\d:?\d* left", shown)
        assert all("warning" not in line for line in bottom)
        assert max(map(len, lines)) <= columns
        assert not re.search(r"[a-z]\n[a-z]{1,3} ", "\n".join(bottom)), "words are not broken"
        assert len(bottom) <= (4 if columns == 40 else 2)
    after = window.look(0.05)
    assert not any("Training " in line and "/12,000" in line for line in after), "what changes is gone at the end"


def test_a_word_of_a_message_is_not_broken_at_the_edge(terminal):
    window = terminal(40)
    output.warn(WARNING)
    output.say("The trained weights are in runs/mine/adapter; try `tunesmith chat runs/mine`.")
    words = {word for line in window.look(0.05) for word in line.split()}
    assert words >= set(WARNING.split()) | {"runs/mine/adapter;"}


def test_an_evaluation_and_a_checkpoint_are_stages_with_progress_of_their_own(terminal):
    window = terminal(72)
    with Display() as display:
        display.show(events.Started(total_steps=10, trained_parameters=8, versions={}))
        display.show(step(4))
        display.progress("Evaluating", 30, 120)
        output.refresh_bottom()
        (line,) = [line for line in window.look(0.05) if "Evaluating" in line]
        assert "step 4/10" in line
        assert "30 of 120" in line
        display.progress("Saving", 0, None)
        assert any("Saving" in line for line in window.look(0.05))
        assert not any("Evaluating" in line for line in window.look())


def test_asking_to_stop_is_acknowledged_and_says_what_a_second_time_does(terminal):
    window = terminal(72)
    with Display() as display:
        display.show(events.Started(total_steps=10, trained_parameters=8, versions={}))
        display.show(events.Stopping("stopped by Ctrl-C"))
        seen = " ".join(window.look(0.05))
        assert "saved first" in seen
        assert "Ctrl-C again stops at once" in seen


def test_the_speed_shown_is_tokens_over_the_time_of_the_same_steps(screen):
    """Not a mean of rates, which steps of different length would raise; nor with what the first step compiled."""
    display, written = screen(False)
    display.show(events.Started(total_steps=5, trained_parameters=8, versions={}))
    display.show(step(1, 100.0, is_warm_up=True))
    assert "warming up" in written.getvalue()
    for number, seconds in ((2, 0.1), (3, 3.1), (4, 0.1), (5, 3.1)):
        display.show(step(number, seconds))
    last = next(line for line in written.getvalue().splitlines() if line.startswith("step 5/5"))
    assert "  40 tokens/s" in last  # 256 tokens in 6.4 s; the mean of the rates is 330


def test_the_time_at_the_end_is_the_one_that_the_speed_counts(screen):
    display, written = screen(False)
    spent = {"starting": 20.0, "training": 10.0, "compiling": 30.0, "evaluating": 5.0, "saving": 0.1}
    display.show(events.Finished(5, 65.1, 64.0, 2**20, 2**20, 60.0, spent=spent))
    assert "5 steps in 0:10, 64 tokens/s (predicted 60)" in written.getvalue()
    assert "1:05 in all: training 0:10, starting 0:20, compiling 0:30, evaluating 0:05\n" in written.getvalue()


def test_a_log_stays_readable(screen, monkeypatch):
    """A line a second at first, one a minute after an hour; a step of an hour shows signs of life."""
    now = [0.0]
    monkeypatch.setattr("tunesmith.cli.display.time.monotonic", lambda: now[0])
    display, written = screen(False)
    display.show(events.Started(total_steps=100_000, trained_parameters=8, versions={}))
    for number in range(1, 36_001):
        now[0] += 0.5
        display.show(step(number))
    lines = written.getvalue().splitlines()
    assert 300 < len(lines) < 600
    for done in range(60):
        now[0] += 60.0
        display.progress(MICRO_BATCHES, done, 60)
    assert "step 36001/100000: micro-batch 60/60" in written.getvalue().splitlines()[-1]
    before = len(written.getvalue())
    display.progress("Evaluating", 0, 100)
    assert len(written.getvalue()) == before, "a short one is not worth a line"
    now[0] += 11.0
    display.progress("Evaluating", 20, 100)
    assert written.getvalue().endswith("Evaluating: 20 of 100\n")


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch, terminal):
    window = terminal(72)
    monkeypatch.setenv("TERM", "dumb")
    run_through(Display())
    window.look(0.05)
    assert "\x1b" not in window.written
    assert "step 2/2" in window.written


def test_waiting_is_shown_in_a_terminal_until_the_result_comes(terminal, monkeypatch):
    window = terminal(72)
    output.stage("Reading a-very-long-name" + "-of-a-file" * 10)
    assert max(map(len, window.look(0.05))) <= 72
    assert "Reading a-very-long-name" in window.screen.lines[0]
    output.note("a remark")
    assert next(line.partition("-")[0] for line in window.look(0.05)) == "a remark"
    output.say("the result")
    assert [line for line in window.look(0.05) if line] == ["a remark", "the result"]
    output.stage("More")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.print_json([])
    assert not any("More" in line for line in window.look(0.05))


def test_waiting_writes_nothing_where_nobody_looks(screen):
    _, written = screen(False)
    output.stage("Reading run.yaml")
    assert written.getvalue() == ""


def test_runs_of_a_sweep_show_what_all_of_them_say_once(screen):
    said: set[str] = set()
    _, written = screen(False)
    for learning_rate in ("1e-4", "2e-4"):
        variant = Display(said)
        variant.show(events.Warned(WARNING))
        variant.show(events.Noted(f"The learning rate is {learning_rate}."))
    assert written.getvalue().count("the data set mine has 12 records") == 1
    assert written.getvalue().count("The learning rate is") == 2
    alone, again = screen(False)
    alone.show(events.Warned(WARNING))
    alone.show(events.Warned(WARNING))
    assert again.getvalue().count("the data set mine has 12 records") == 2
