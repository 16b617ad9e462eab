"""What goes on inside a run is told while it goes on, and adds up at its end."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest

from tiny import write_all
from tunesmith.train import events
from tunesmith.train.loop import MICRO_BATCHES, train
from tunesmith.train.signals import stop_signals


@pytest.fixture
def job(tiny_model, tmp_path, monkeypatch):
    """Of three steps with four micro-batches, and evaluations after two and three."""
    from tunesmith.config.load import load
    from tunesmith.plan.plan import Plan
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run

    write_all(tmp_path, tiny_model, steps=3, eval_every=2, save_every=100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    plan = Plan.model_validate_json((tmp_path / "plan.json").read_text())
    return assemble(prepare_run(load("run.yaml").run, plan=plan, warn=lambda _: None))


def test_micro_batches_evaluation_saving_and_the_result_are_told_while_they_go_on(job):
    told, seen = [], []
    assert train(job, seen.append, progress=lambda *one: told.append(one)).is_finished
    assert [one for one in told if one[0] == MICRO_BATCHES] == [(MICRO_BATCHES, done, 4) for done in range(4)] * 3
    evaluated = [(done, total) for name, done, total in told if name == "Evaluating"]
    assert evaluated.count((0, None)) == 3
    assert evaluated[-1] == (4, 4)
    stages = list(dict.fromkeys(name for name, _, _ in told))
    assert stages == ["Evaluating", MICRO_BATCHES, "Saving", "Writing the result"]
    steps = [event for event in seen if isinstance(event, events.Step)]
    assert [step.is_warm_up for step in steps] == [True, False, False]
    (end,) = [event for event in seen if isinstance(event, events.Finished)]
    assert sum(end.spent.values()) == pytest.approx(end.seconds, abs=0.01)
    tokens = sum(step.tokens for step in steps)
    assert end.spent["training"] * end.tokens_per_second == pytest.approx(tokens, rel=0.02)
    assert end.tokens_per_second == pytest.approx(
        sum(step.tokens for step in steps[1:]) / sum(step.seconds for step in steps[1:]), rel=0.02
    )


def test_the_wait_for_data_counts_as_time_of_the_step(job, monkeypatch):
    iterate = job.loader.iterate

    def slowly(start: int):
        for batch in iterate(start):
            time.sleep(0.2)
            yield batch

    monkeypatch.setattr(type(job.loader), "iterate", lambda _, start=0: slowly(start))
    seen = []
    train(job, seen.append)
    assert all(event.seconds >= 0.2 for event in seen if isinstance(event, events.Step))


def test_asked_to_stop_a_run_does_not_wait_for_the_end_of_an_evaluation(job):
    told, seen = [], []

    def progress(name: str, done: int, total: int | None) -> None:
        told.append((name, done, total))
        if name == "Evaluating" and done and any(isinstance(event, events.Step) for event in seen):
            signal.raise_signal(signal.SIGINT)

    outcome = train(job, seen.append, progress=progress)
    assert (outcome.step, outcome.is_finished, outcome.reason) == (2, False, "stopped by Ctrl-C")
    assert [event.step for event in seen if isinstance(event, events.Evaluation)] == [0]
    assert isinstance(seen[-1], events.Stopped)
    assert "everything is saved" in seen[-1].reason


def test_ctrl_c_is_acknowledged_at_once_while_the_program_waits_for_something_else():
    heard: list[tuple[str, float]] = []
    before = signal.getsignal(signal.SIGINT)
    with stop_signals(lambda reason: heard.append((reason, time.monotonic()))) as asked_to_stop:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)  # no Python code runs in this thread meanwhile
        back = time.monotonic()
        assert asked_to_stop() == "stopped by Ctrl-C"
        while not heard:
            time.sleep(0.01)
    ((reason, when),) = heard
    assert reason == "stopped by Ctrl-C"
    assert when < back
    assert signal.getsignal(signal.SIGINT) is before
