"""What a run looks like in a terminal, where newcomers see it, and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tunesmith.cli import output
from tunesmith.cli.display import Display
from tunesmith.train import events


@pytest.fixture
def screen(monkeypatch):
    def make(is_terminal: bool) -> tuple[Display, io.StringIO]:
        written = io.StringIO()
        console = Console(file=written, force_terminal=is_terminal, width=160, highlight=False, markup=False)
        monkeypatch.setattr(output, "stdout", lambda: console)
        return Display(), written

    return make


def run_through(display: Display) -> None:
    display.stage("Starting")
    with display:
        display.progress("Tokenizing mine", 3, None)
        display._bar.refresh()
        display.progress("Tokenizing mine", 5, 10)
        display.stage("Loading the model")
        display._bar.refresh()
        display.show(events.Started(total_steps=2, trained_parameters=8, versions={}))
        display.show(events.Evaluation(0, 2.0, {"mine": 2.0}, 5.0, 0.1))
        for step in (1, 2):
            display.show(events.Step(step, step / 2, 1.5, 1e-3, 1.0, 64, 20.0, 0.5, 2**20, {"mine": 1.5}))
            display._bar.refresh()
        display.show(events.Checkpointed(2, 0.1))
        display.show(events.Finished(2, 1.0, 64.0, 2**20, 2**20))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_stage_of_a_run_can_be_shown(screen, is_terminal):
    display, written = screen(is_terminal)
    run_through(display)
    text = written.getvalue()
    for expected in ("Tokenizing mine", "Loading the model", "held-out loss 2.0000", "2/2", "loss 1.5000", "1.0 MiB"):
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
