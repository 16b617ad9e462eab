"""Numbers that mean failure are not trained on: no gradient, weights that explode, weights that stay where they are."""

from __future__ import annotations

import math

import pytest
import torch

from parallel.on_ranks import job_of
from tiny import write_all
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan import task
from tunesmith.run.choose import launch_plan, new_plan
from tunesmith.train import events, loop
from tunesmith.train.loop import train
from tunesmith.train.step import NotFinite, StepResult
from tunesmith.train.vitals import EVERY, SAMPLED, Failing, Sample, Vitals, Weights, weights_of


@pytest.fixture
def job(tiny_model, tmp_path):
    def of(**changes):
        folder = write_all(tmp_path, tiny_model, eval=[], save_every=2)
        settings = {"data": [{"path": str(folder / "train.jsonl")}], "output": str(folder / "run"), "steps": 5}
        return job_of(Ranks(), str(folder), {}, "none", **settings | changes)

    return of


def run_of(**settings) -> Run:
    return from_mapping({"model": "m", "data": "d"} | settings)


def warnings_of(seen: list[events.Event]) -> list[str]:
    return [event.message for event in seen if isinstance(event, events.Warned)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "lion", "muon", "adafactor"])
def test_a_learning_rate_that_cannot_be_meant_is_refused_before_anything_is_read(optimizer):
    with pytest.raises(UserError, match=r"learning_rate is 1e\+30, and .* 2e-4 is usual for adapters"):
        task.check_rate(run_of(optimizer=optimizer), 1e30)
    task.check_rate(run_of(optimizer=optimizer), 0.5)
    task.check_rate(run_of(optimizer="sgd"), 30.0)


def test_nor_may_a_plan_made_by_hand_have_one(tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    run = from_mapping({"model": str(tiny_model), "data": str(folder / "train.jsonl"), "sequence_length": 64})
    with pytest.raises(UserError, match="learning_rate is 1e"):
        launch_plan(run, plan=new_plan(run).changed(learning_rate=1e30))


@pytest.mark.parametrize("saves", [1, 100])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_that_explode_stop_the_run_and_are_not_saved(job, method, saves, monkeypatch):
    monkeypatch.setattr(task, "HIGHEST_RATE", math.inf)
    one = job(method=method, learning_rate=1e30, warmup=0, save_every=saves)
    with pytest.raises(
        NotFinite, match=r"The trained weights have exploded: after step 1 .*e\+[23]|not a finite number"
    ):
        train(one, lambda _: None)
    assert not (one.folder / "adapter").exists()
    assert not (one.folder / "model").exists()
    assert not list((one.folder / "checkpoints").glob("step-*"))


def test_weights_that_explode_late_leave_the_checkpoint_before(job, monkeypatch):
    one = job(steps=40, save_every=4, learning_rate=1e-3)
    real = loop.rate_of
    monkeypatch.setattr(loop, "rate_of", lambda job, step: 8.0 if step == 9 else real(job, step))
    with pytest.raises(NotFinite, match=r"have exploded: after step 12 .* The checkpoint of step 8 is kept"):
        train(one, lambda _: None)
    assert one.checkpoints.latest().step == 8


def test_an_explosion_is_seen_without_any_checkpoint(job, monkeypatch):
    one = job(steps=40, save_every=100, learning_rate=1e-3)
    real, seen = loop.rate_of, []
    monkeypatch.setattr(loop, "rate_of", lambda job, step: 8.0 if step == 9 else real(job, step))
    with pytest.raises(NotFinite, match=f"have exploded: after step {EVERY} "):
        train(one, seen.append)
    assert max(event.step for event in seen if isinstance(event, events.Step)) == EVERY + 1


def test_a_first_gradient_of_exactly_0_stops_the_run(job):
    one = job(method="full", learning_rate=1e-3)
    with torch.no_grad():
        one.model.model.norm.weight.zero_()  # the last norm: every logit is 0, whatever the weights below
        one.model.lm_head.weight.zero_()
    for name, parameter in one.model.named_parameters():
        parameter.requires_grad_("layers.0.mlp" in name)
    with pytest.raises(NotFinite, match="The gradient of step 1 is exactly 0, so nothing can be learned"):
        train(one, lambda _: None)
    assert not (one.folder / "model").exists()


def see(vitals: Vitals, step: int, norm: float, loss: float = 2.0) -> str | None:
    return vitals.see_step(step, loss, norm, 1e-3)


def test_a_gradient_that_is_0_once_is_warned_of_and_one_that_stays_0_stops_the_run():
    vitals = Vitals(run_of(), 1e-3, resumes=False)
    assert see(vitals, 1, 1.0) is None
    assert "The gradient of step 2 is exactly 0" in see(vitals, 2, 0.0)
    assert see(vitals, 3, 0.0) is None, "once is enough"
    assert see(vitals, 4, 0.5) is None
    see(vitals, 5, 0.0)
    see(vitals, 6, 0.0)
    with pytest.raises(Failing, match="exactly 0 for 3 steps, up to step 7, while the loss is 2,"):
        see(vitals, 7, 0.0)


def test_data_that_are_known_by_heart_stop_nothing():
    vitals = Vitals(run_of(), 1e-3, resumes=False)
    see(vitals, 1, 1.0)
    assert "nothing is left to learn" in see(vitals, 2, 0.0, loss=0.0)
    for step in range(3, 30):
        assert see(vitals, step, 0.0, loss=0.0) is None


def test_answers_that_all_earn_the_same_are_told_once():
    vitals = Vitals(run_of(), 1e-3, resumes=False)
    alike = {"reward": 0.0, "no_spread": 1.0, "truncated": 0.9}
    assert [vitals.see_rewards(step, alike) for step in range(1, 5)] == [None] * 4
    assert vitals.see_rewards(5, {**alike, "no_spread": 0.5}) is None
    assert [vitals.see_rewards(step, alike) for step in range(6, 10)] == [None] * 4
    said = vitals.see_rewards(10, alike)
    assert "In 5 steps, up to step 10, all answers to a prompt had the same reward (0 in the last one)" in said
    assert "90% of them are cut off" in said
    assert vitals.see_rewards(11, alike) is None
    assert Vitals(run_of(), 1e-3, resumes=False).see_rewards(1, {}) is None


def test_embeddings_with_nothing_to_compare_with_are_told_so():
    vitals = Vitals(run_of(objective="embed"), 1e-3, resumes=False)
    with pytest.raises(Failing, match="one record, or the same text in all"):
        see(vitals, 1, 0.0, loss=0.0)
    see(vitals, 1, 1.0)
    assert "with nothing to compare them with" in see(vitals, 2, 0.0, loss=0.0)


def test_a_run_that_goes_on_is_not_stopped_by_its_first_step_alone():
    assert "exactly 0" in see(Vitals(run_of(), 1e-3, resumes=True), 11, 0.0)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("steps", [1, 5])
def test_steps_in_which_nothing_moves_are_warned_of_once(job, method, steps):
    seen: list[events.Event] = []
    assert train(job(method=method, learning_rate=1e-20, warmup=0, steps=steps), seen.append).is_finished
    (warning,) = warnings_of(seen)
    assert "The weights did not move up to step 1: the learning rate, 1e-20 at most" in warning


def test_ordinary_training_is_not_warned_of(job):
    """At a rate that is high for adapters, over many steps, through warm-up and to the schedule's end."""
    seen: list[events.Event] = []
    assert train(job(learning_rate=2e-2, steps=20, save_every=9, warmup=0.3), seen.append).is_finished
    assert warnings_of(seen) == []


def test_steps_that_fp16_skips_may_move_nothing_and_have_no_gradient(job, monkeypatch):
    one = job(steps=4, save_every=100)
    made = loop._Loop(one, lambda _: None, 0.0, None, lambda *_: None)
    monkeypatch.setattr(made.vitals, "see_step", lambda *_: pytest.fail("it was judged"))
    batch = one.loader.step(0)
    skipped = StepResult(2.0, 0.0, {0: 2.0}, is_skipped=True, weights=Weights(1.0, 0.0))
    made.underway = loop._LaunchedStep(batch, 1e-3, 0.0, lambda: skipped)
    made.vitals.last = Weights(1.0, None)
    made._finish_step()
    assert made.vitals.said == set()


def test_weights_grown_a_hundredfold_are_warned_of():
    vitals = Vitals(run_of(), 1e-2, resumes=False)
    for step, size in enumerate((0.01, 0.09, 0.8)):
        assert vitals.see_weights(Weights(size, size), step) is None
    assert "100 times as large as at first (1.1, 0.01 then)" in vitals.see_weights(Weights(1.1, 1.0), 9)
    with pytest.raises(Failing):
        vitals.see_weights(Weights(math.inf, math.inf), 10)


def test_a_sample_sees_every_weight_and_how_far_it_moved():
    large, small, empty = torch.zeros(4099, 3), torch.ones(5, dtype=torch.bfloat16), torch.zeros(0, 7)
    sample = Sample([large, small, empty])
    count, squares, moved = sample.measure(torch.device("cpu")).tolist()
    assert SAMPLED + 5 <= count <= 2 * SAMPLED + 5
    assert squares == 5.0
    assert math.isnan(moved)
    large += 2.0
    found = weights_of(*sample.measure(torch.device("cpu")).tolist())
    assert found.moved == pytest.approx(math.sqrt(4 * (count - 5) / count))
    small *= math.nan
    assert weights_of(*sample.measure(torch.device("cpu")).tolist()).size == math.inf


@pytest.mark.distributed
def test_ranks_come_to_the_same_end(world, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model, eval=[], save_every=1)
    options = {"folder": str(folder), "mesh": {"shard": 2}, "sharding": "zero3", "method": "full", "warmup": 0}
    settings = {"data": [{"path": str(folder / "train.jsonl")}], "output": str(folder / "run"), "steps": 5}
    said = world(2)("parallel.on_ranks:failure", **options, **settings, optimizer="sgd", learning_rate=1e4)
    assert said[0] == said[1]
    assert "The trained weights have exploded: after step 1 " in said[0]
