"""Alerts: planted faults raise the right one, with its evidence; healthy runs raise none."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import time

import pytest
import torch

from objectives.test_runs import write_preferences
from parallel.on_ranks import job_of
from rollout_tasks import write_prompts
from rollout_tasks import write_run as write_rollouts
from tiny import write_all, write_data
from tunesmith.cli.training import _memory_errors_in_words, _what_would_fit
from tunesmith.config.load import from_mapping
from tunesmith.data.loader import Loader
from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan import hardware, task
from tunesmith.run.choose import new_plan
from tunesmith.train import events, loop, machine
from tunesmith.train import step as train_step
from tunesmith.train.alerts import Alerts, Reading
from tunesmith.train.loop import train
from tunesmith.train.phases import OutOfMemory
from tunesmith.train.step import NotFinite

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def step_of(step: int, loss: float, norm: float = 0.5, **more) -> events.Step:
    given = {"seconds": 0.5, "memory": 0} | more
    return events.Step(step, step / 100, loss, 1e-4, norm, 8192, 5000.0, **given)


def evaluation_of(step: int, loss: float) -> events.Evaluation:
    return events.Evaluation(step, loss, {"data": loss}, 1000.0, 1.0)


def raised(stream, **how) -> list[str]:
    alerts = Alerts(**how)
    return [one.name for event in stream for one in alerts.see(event)]


def healthy(seed: int):
    """As runs are: another level, noise, tail, schedule, memorization and number of evaluations each."""
    chance = random.Random(seed)
    noise, tail = [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.05, 0.8, 0.15, 0.02][seed], seed % 3 == 0
    level, end, steps = 1 + seed % 4, [0.9, 0.5, 0.02, 0.7, 0.95][seed % 5], [120, 400, 3000][seed % 3]
    yield evaluation_of(0, level)
    for step in range(1, steps + 1):
        done = step / steps
        mean = level * (end + (1 - end) * math.exp(-5 * done))
        spread = math.exp(chance.gauss(0, noise)) if tail else max(0.2, 1 + chance.gauss(0, min(noise, 0.3)))
        norm = (0.3 + 2 * math.exp(-9 * done)) * math.exp(chance.gauss(0, 0.5))
        yield step_of(step, mean * spread, norm, waited=chance.random() * 0.05)
        if step % (steps // 10) == 0:  # a little worse at the end, as is usual
            yield evaluation_of(step, level * (end + (1 - end) * math.exp(-5 * done) + 0.01 * max(0, done - 0.6)))


@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_raise_none(seed):
    assert raised(healthy(seed)) == []


def test_two_data_sets_of_different_losses_are_no_spikes():
    chance = random.Random(0)
    stream = [step_of(n, (3.0 if chance.random() < 0.2 else 1.0) + chance.gauss(0, 0.02)) for n in range(1, 2000)]
    assert raised(stream) == []


def noisy(steps, at=lambda step: 1.5, seed=0):
    chance = random.Random(seed)
    return [step_of(step, at(step) + chance.gauss(0, 0.05)) for step in range(1, steps + 1)]


def test_a_spike_is_told_with_its_step_and_once():
    alerts = Alerts()
    found = [one for event in noisy(200, lambda step: 4.0 if step in (90, 91) else 1.5) for one in alerts.see(event)]
    assert [(one.name, one.step) for one in found] == [("loss spike", 90)]
    assert "The loss of step 90 is" in found[0].evidence
    assert "branch" in found[0].advice


def test_divergence_is_told_where_a_run_falls_back_and_where_it_never_stood():
    later = raised(noisy(300, lambda step: 1.5 if step < 200 else 1.5 + (step - 200) * 0.1))
    assert "divergence" in later
    assert later.count("divergence") == 1
    at_once = [evaluation_of(0, 5.0), step_of(1, 5.0), *(step_of(n, 12.0 + 5 * (n % 3)) for n in range(2, 30))]
    assert raised(at_once) == ["divergence"]
    assert raised(at_once, judges_loss=False) == []


def test_overfitting_needs_a_held_out_loss_that_rises_while_the_training_loss_falls():
    def stream(held_out, falls=True):
        for step in range(1, 101):
            yield step_of(step, 2.0 - (0.015 * step if falls else 0) + 0.01 * (step % 3))
            if step % 10 == 0:
                yield evaluation_of(step, held_out(step))

    rising = lambda step: 1.5 + 0.01 * abs(step - 50)  # noqa: E731
    assert raised(stream(rising)) == ["overfitting"]
    assert raised(stream(rising, falls=False)) == []
    assert raised(stream(lambda step: 1.5 + 0.002 * (step % 20))) == []


def test_gradients_that_explode_or_die():
    chance = random.Random(1)
    norms = [math.exp(chance.gauss(0, 0.3)) for _ in range(100)]
    exploding = [step_of(n + 1, 1.5, 500.0 if n == 60 else norm) for n, norm in enumerate(norms)]
    assert raised(exploding, clip=1.0) == ["exploding gradients"]
    dying = [step_of(n + 1, 1.5, norm if n < 50 else 1e-6) for n, norm in enumerate(norms)]
    assert raised(dying) == ["dead gradients"]
    learned = [step_of(n + 1, 1.5 if n < 50 else 0.001, norm if n < 50 else 1e-6) for n, norm in enumerate(norms)]
    assert raised(learned) == []


def test_a_loader_that_is_waited_for_is_told_by_its_share_of_the_time():
    assert raised([step_of(n, 1.5, waited=0.3) for n in range(1, 30)]) == ["data starvation"]
    assert raised([step_of(n, 1.5, waited=0.3, is_warm_up=n < 5) for n in range(1, 5)]) == []
    assert raised([step_of(n, 1.5, waited=0.05) for n in range(1, 30)]) == []


def test_the_machine_is_judged_by_several_readings():
    def read(*readings):
        alerts = Alerts()
        return [one.name for n, one in enumerate(readings) for one in alerts.see_machine(n, one)]

    fine = Reading(100 * GIB, 128 * GIB, {}, (1.0, 1.1, 0.9, 1.0))
    assert read(*[fine] * 9) == []
    assert read(*[dataclasses.replace(fine, host_available=GIB)] * 3) == ["host memory"]
    hot = dataclasses.replace(fine, hot={2: "91 °C, thermal slowdown"})
    assert read(fine, hot, hot, fine, hot) == []
    assert read(hot, hot, hot) == ["GPU slowed down"]
    slow = dataclasses.replace(fine, seconds=(1.0, 1.1, 2.4, 1.0))
    assert read(slow, fine, slow) == []
    assert read(slow, slow, slow) == ["slow rank"]
    assert read(*[dataclasses.replace(fine, seconds=(1.0, 2.0))] * 3) == ["slow rank"]


def test_a_run_that_goes_on_recalls_what_was_said():
    stream = noisy(200, lambda step: 4.0 if step == 90 else 1.5)
    whole, resumed = Alerts(), Alerts()
    for event in stream[:95]:
        whole.see(event)
    resumed.recall({"event": event.kind, "time": 1.0, **dataclasses.asdict(event)} for event in stream[:95])
    assert [resumed.see(one) for one in stream[95:]] == [whole.see(one) for one in stream[95:]]


@pytest.fixture
def job(tiny_model, tmp_path):
    def of(**changes):
        folder = write_all(tmp_path, tiny_model, eval=[], save_every=100)
        settings = {"data": [{"path": str(folder / "train.jsonl")}], "output": str(folder / "run"), "steps": 12}
        return job_of(Ranks(), str(folder), {}, "none", **settings | changes)

    return of


def alerts_of(job, fails=()) -> list[events.Alert]:
    seen: list[events.Event] = []
    if fails:
        with pytest.raises(fails):
            train(job, seen.append)
    else:
        assert train(job, seen.append).is_finished
    return [event for event in seen if isinstance(event, events.Alert)]


def test_a_tensor_that_no_gradient_reaches_is_named(job):
    one = job()
    name, weight = next((n, w) for n, w in one.optimizer.weights.items() if n.endswith("lora_a"))
    weight.register_hook(torch.zeros_like)
    (alert,) = alerts_of(one)
    assert alert.name == "frozen tensors"
    assert name in alert.evidence
    assert f"1 of {len(one.optimizer.weights)}" in alert.evidence


def test_a_slow_loader_is_seen_by_the_loop(job, monkeypatch):
    real = Loader.iterate

    def slow(self, start=0):
        took = 0.0
        for batch in real(self, start):
            time.sleep(max(0.15, took))  # as long as the step before, however slow that was
            given = time.monotonic()
            yield batch
            took = time.monotonic() - given

    monkeypatch.setattr(Loader, "iterate", slow)
    assert [alert.name for alert in alerts_of(job())] == ["data starvation"]


def test_a_learning_rate_a_thousand_times_too_high_diverges(job, monkeypatch):
    monkeypatch.setattr(task, "HIGHEST_RATE", math.inf)  # else it is refused before
    seen: list[events.Event] = []
    with contextlib.suppress(NotFinite):  # where weights explode before that
        train(job(learning_rate=5.0, warmup=0, steps=30), seen.append)
    found = [event.name for event in seen if isinstance(event, events.Alert)]
    assert "divergence" in found, [event.loss for event in seen if isinstance(event, events.Step)]


def test_data_that_give_nan_are_an_alert(job, monkeypatch):
    one = job()
    real = loop.TrainStep.launch

    def launch(self, batch, *rest):
        if batch.step == 2:
            raise NotFinite("The loss of step 3 is not a finite number; the data behind it: train.jsonl, line 7.")
        return real(self, batch, *rest)

    monkeypatch.setattr(loop.TrainStep, "launch", launch)
    (alert,) = alerts_of(one, NotFinite)
    assert (alert.name, alert.is_fatal) == ("not finite", True)
    assert "line 7" in alert.evidence


def test_the_very_record_whose_loss_is_nan_is_named(job, monkeypatch):
    one, real, origins = job(), train_step.token_losses, []
    monkeypatch.setattr(one.loader, "step", record(one.loader.step, origins))

    def losses(model, inputs, *rest, **more):
        total, losses_n = real(model, inputs, *rest, **more)
        return total, torch.where(torch.arange(len(losses_n)) == 0, math.nan, losses_n)

    monkeypatch.setattr(train_step, "token_losses", losses)
    (alert,) = alerts_of(one, NotFinite)
    assert alert.name == "not finite"
    firsts = [micro_batch.origins[0] for micro_batch in origins[0].micro_batches]
    assert f"the data behind it: {'; '.join(firsts)}." in alert.evidence


def record(function, seen):
    def call(s):
        seen.append(function(s))
        return seen[-1]

    return call


def test_what_would_fit_after_memory_ran_out_is_a_plan_that_takes_less(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a " * 3000, "completion": "b"}) + "\n")
    given = {"model": str(tmp_path), "data": str(tmp_path / "train.jsonl"), "sequence_length": 8192}
    run = from_mapping(given | {"method": "full", "batch_tokens": 65536, "precision": "bf16"})
    here = hardware.named("H100")
    monkeypatch.setattr(hardware, "probe", lambda: here)
    plan = new_plan(run, here)
    error = OutOfMemory(3, {}, int(1.5 * plan.memory.allocated), is_on_gpu=True)
    words = _what_would_fit(run, plan, error)
    assert words.startswith((" What would fit: the plan's ", " No other plan of these settings would take less"))
    assert _what_would_fit(None, plan, error) == ""


def test_the_machine_is_read_after_some_steps_by_all_ranks_alike(monkeypatch):
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    alone = machine.Machine(Ranks(), torch.device("cpu"))
    found = [alone.after_step() for _ in range(machine.SETTLED + 1)]
    assert found[: machine.SETTLED - 1] == [None] * (machine.SETTLED - 1)
    assert 0 < found[-1].host_available <= found[-1].host_total
    assert not found[-1].seconds

    class Two(Ranks):
        count = 2

        def gather(self, text):
            return [text, json.dumps({"hot": "95 °C", "seconds": 9.0})] if text.startswith("{") else [text, text]

    two = machine.Machine(Two(), torch.device("cpu"))
    *_, last = (two.after_step() for _ in range(machine.SETTLED))
    assert last.hot == {1: "95 °C"}
    assert last.seconds[1] == 9.0 > last.seconds[0] > 0


def test_memory_that_ran_out_is_told_by_category_beside_what_was_predicted(job, monkeypatch):
    one = job()
    monkeypatch.setattr(loop.TrainStep, "launch", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
    seen: list[events.Event] = []
    with pytest.raises(OutOfMemory) as caught:
        train(one, seen.append)
    caught.value.held.update({"weights and states": 3 * GIB, "activations": 2 * GIB})
    seen = []
    with (
        pytest.raises(UserError, match="micro_batch"),
        _memory_errors_in_words(one.plan, one.folder, one.run, seen.append),
    ):
        raise caught.value
    (alert,) = seen
    assert alert.name == "out of memory"
    assert "weights and states 3.00 GiB, activations 2.00 GiB" in alert.evidence
    assert "Predicted at the peak" in alert.evidence


def test_healthy_training_raises_none(job):
    assert alerts_of(job(steps=20)) == []


SFT = {"data": lambda path, count, seed: write_data(path, count, seed=seed), "drop": 0.3}
PAIRS = {"data": lambda path, count, seed: write_preferences(path, count, seed=seed), "drop": 0.1}
JUDGED = {"data": lambda path, count, seed: write_preferences(path, count, seed=seed, judged=True), "drop": 0.1}
PREFERENCES = {"sequence_length": 128, "batch_tokens": 1024}
HEALTHY: dict[str, tuple[dict, dict]] = {
    "adapters": (SFT, {}),
    "all weights": (SFT, {"method": "full", "learning_rate": 2e-3, "schedule": "linear"}),
    "4 bits": (SFT, {"method": "qlora", "lora": {"rank": 8}, "schedule": "wsd"}),
    "muon": (SFT, {"method": "full", "optimizer": "muon", "learning_rate": 5e-3, "weight_decay": 0.1}),
    "lion, every token a target": (
        SFT,
        {"optimizer": "lion", "learning_rate": 2e-3, "lora": {"rank": 4, "dora": True}, "train_on": "all"},
    ),
    "dpo": (PAIRS, PREFERENCES | {"objective": "dpo"}),
    "orpo of all weights": (
        PAIRS,
        PREFERENCES | {"objective": "orpo", "method": "full", "learning_rate": 1e-3},
    ),
    "simpo": (PAIRS, PREFERENCES | {"objective": "simpo"}),
    "kto": (JUDGED, PREFERENCES | {"objective": "kto"}),
    "grpo": ({}, {"objective": "grpo", "steps": 40, "rollout": {"prompts": 8, "answers": 4}, "eval_every": 10}),
}
"""How each run's data are made, the share by which its held-out loss must fall at least, and its settings."""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "name"), enumerate(HEALTHY), ids=list(HEALTHY))
def test_ten_real_runs_that_learn_raise_none(runs, tiny_model, tmp_path, seed, name):
    how, changes = HEALTHY[name]
    common = {"seed": seed, "save_every": 1000}
    if how:
        common |= {"epochs": 2, "batch_tokens": 512, "eval_every": 12}
        folder = write_all(tmp_path, tiny_model, **common | changes)
        how["data"](folder / "train.jsonl", 600, seed)
        how["data"](folder / "held_out.jsonl", 30, 100 + seed)
    else:
        folder = write_rollouts(tmp_path, tiny_model, **common | changes)
        write_prompts(folder / "train.jsonl", 400, seed=seed)
    done = runs(folder, "train", "run.yaml")
    assert done.code == 0, done.err
    found = events.read(folder / "run")
    steps, evaluations = ([one for one in found if one["event"] == kind] for kind in ("step", "evaluation"))
    assert len(steps) >= 40
    first, last = evaluations[0], evaluations[-1]
    print(name, len(steps), first["loss"], last["loss"], f"{done.seconds:.1f} s")
    if how:
        assert last["loss"] < (1 - how["drop"]) * first["loss"]
    else:
        assert last["figures"]["reward"] > first["figures"]["reward"] + 0.3
    assert [one for one in found if one["event"] == "alert"] == []


@pytest.mark.parametrize("is_duplicated", [True, False])
def test_held_out_examples_among_the_training_data_are_an_alert(runs, tiny_model, tmp_path, is_duplicated):
    folder = write_all(tmp_path, tiny_model, steps=1)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if is_duplicated:
        lines = train.read_text().splitlines(keepends=True)
        held_out.write_text(held_out.read_text() + "".join(lines[:3]))
    done = runs(folder, "train", "run.yaml")
    assert done.code == 0, done.err
    said = [one for one in events.read(folder / "run") if one["event"] == "alert"]
    assert [one["name"] for one in said] == (["leak"] if is_duplicated else [])
    assert not is_duplicated or (said[0]["evidence"] and "Take them out" in said[0]["advice"])
