"""Evaluation takes a tenth of training's time unless more is asked for, and is always of the same examples."""

from __future__ import annotations

import dataclasses
import json
import signal
import time

import pytest

from tiny import SETTINGS, Die, write_all, write_data
from tunesmith.train import events
from tunesmith.train.loop import train


@pytest.fixture
def job_of(tiny_model, tmp_path, monkeypatch):
    """Makes a job; the run's folder is the same each time."""
    from tunesmith.config.load import load
    from tunesmith.plan.plan import Plan
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run

    def make(records: int = 4, **changes):
        write_all(tmp_path, tiny_model, **{"eval_every": None, "save_every": 100, **changes})
        write_data(tmp_path / "held_out.jsonl", records, seed=1)
        plan = Plan.model_validate_json((tmp_path / "plan.json").read_text())
        return assemble(prepare_run(load("run.yaml").run, plan=plan, warn=lambda _: None))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    return make


def taking(job, seconds: float):
    """The job, with evaluations that last so long."""

    def evaluate(step: int, *_) -> events.Evaluation:
        time.sleep(seconds)
        return events.Evaluation(step, 1.0, {"held_out": 1.0}, 1.0, seconds)

    return dataclasses.replace(job, evaluate=evaluate)


def evaluated(job, observe=lambda _: None) -> list[int]:
    """The steps after which the run was evaluated."""
    seen = []

    def note(event: events.Event) -> None:
        seen.append(event)
        observe(event)

    assert train(job, note).is_finished
    return [event.step for event in seen if isinstance(event, events.Evaluation)]


def slow_steps(job, monkeypatch, seconds: float) -> None:
    iterate = job.loader.iterate

    def slowly(start: int):
        for batch in iterate(start):
            time.sleep(seconds)
            yield batch

    monkeypatch.setattr(type(job.loader), "iterate", lambda _, start=0: slowly(start))


def test_evaluations_that_take_long_beside_training_are_left_out_but_the_first_and_the_last(job_of):
    assert evaluated(taking(job_of(steps=10), 0.5)) == [0, 10]


def test_evaluations_take_a_tenth_of_the_time_of_training(job_of, monkeypatch):
    job = taking(job_of(steps=20), 0.015)
    slow_steps(job, monkeypatch, 0.05)
    seen = []
    steps = evaluated(job, seen.append)
    (end,) = [event for event in seen if isinstance(event, events.Finished)]
    assert end.spent["evaluating"] <= 0.11 * end.spent["training"]
    assert 4 <= len(steps) < 11


def test_evaluations_that_were_asked_for_all_take_place(job_of):
    assert evaluated(taking(job_of(steps=4, eval_every=1), 0.3)) == [0, 1, 2, 3, 4]


def test_a_continued_run_counts_the_evaluations_of_earlier_sittings(job_of, monkeypatch):
    log = events.EventLog(job_of(steps=10).folder)
    job = taking(job_of(steps=10, save_every=4), 0.4)

    def until_saved(event: events.Event) -> None:
        log.write(event)
        if isinstance(event, events.Checkpointed):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(job, until_saved)
    again = taking(job_of(steps=10, save_every=4), 0.0)  # quick now: what was spent before still counts
    assert evaluated(again, log.write) == [10]
    log.close()


def test_many_held_out_examples_beside_a_short_training_are_sampled_and_said_unless_all_are_asked_for(job_of):
    sample, everything = job_of(400, steps=2), job_of(400, steps=2, eval_every=1)
    said = [[one for one in job.warnings if "held-out examples are evaluated" in one] for job in (sample, everything)]
    assert said[0][0].startswith("16 of the 400 ")
    assert said[1] == []
    counts = []
    for job in (sample, everything):
        job.model.eval()
        told = []
        job.evaluate(0, lambda done, total, told=told: told.append((done, total)))
        counts.append(told[-1])
    assert counts == [(16, 16), (400, 400)]


def test_without_eval_some_records_are_held_out_evaluated_and_the_same_ones_when_the_run_goes_on(
    runs, tiny_model, tmp_path
):
    settings = {key: value for key, value in SETTINGS.items() if key not in ("eval", "epochs")}
    write_data(tmp_path / "train.jsonl", 120)
    (tmp_path / "run.yaml").write_text(json.dumps(settings | {"model": str(tiny_model), "steps": 6}))
    killed = runs(tmp_path, "train", die=Die("tunesmith.train.loop:_Loop._finish_step", 10))
    assert killed.code == -signal.SIGKILL
    before = [record for record in events.read(tmp_path / "run") if record["event"] == "evaluation"]
    assert before[0]["step"] == 0
    assert runs(tmp_path, "train").code == 0
    history = events.read(tmp_path / "run")
    assert any(record["event"] == "resumed" for record in history)
    evaluations = [record for record in history if record["event"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [0, 4, 6]
    assert {record["target_tokens"] for record in evaluations} == {before[0]["target_tokens"]}
    assert list(evaluations[0]["losses"]) == ["train (held out)"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["held_out"] == 6
    said = runs(tmp_path, "eval", "run")
    assert said.code == 0, said.err
    assert f"{evaluations[-1]['loss']:.4f}" in said.out


def test_few_steps_that_nobody_asked_for_are_said_when_a_run_starts(job_of):
    assert [one for one in job_of(epochs=None).warnings if "fewer than 100: each step" in one]
    assert not [one for one in job_of(steps=2).warnings if "fewer than 100" in one]
