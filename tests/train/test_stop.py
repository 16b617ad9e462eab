"""`stop_when` ends a run by what its evaluations show, with its result, and after a kill at the same step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tiny import Die, write_all
from tunesmith.config.values import stop_rule
from tunesmith.run.stop import StopRule

STILL = {"learning_rate": 1e-9, "eval_every": 1, "save_every": 1, "stop_when": "no gain in 2 evaluations"}


def documents(chance, shift: float) -> dict[str, tuple[float, float]]:
    hard = np.random.default_rng(0).gamma(2.0, 1.0, 60)
    return {str(n): (float(10 * (h + shift + chance.normal(0, 0.05))), 10.0) for n, h in enumerate(hard)}


def test_gains_beyond_chance_go_on_and_the_lack_of_them_ends_a_run():
    chance = np.random.default_rng(1)
    rule = StopRule("no gain in 3 evaluations")
    for step, shift in enumerate((0.0, -0.1, -0.2, -0.3)):
        rule.tell(step, 1.0, documents(chance, shift))
        assert rule.reason is None
    again = StopRule("no gain in 3 evaluations")
    again.restore(json.loads(json.dumps(rule.state())))
    for one in (rule, again):
        chance = np.random.default_rng(2)
        found = []
        for step in range(4, 8):
            one.tell(step, 1.0, documents(chance, -0.29))
            found.append(one.reason)
        assert found[1] is None
        assert found[2] is not None
    small = StopRule("no gain in 3 evaluations")  # small gains add up until they are beyond chance
    for step in range(12):
        small.tell(step, 1.0, documents(chance, -0.015 * step))
        assert small.reason is None


@pytest.mark.parametrize("text", ["no gain in 0 evaluations", "loss below x", "3", "no gain in 3 steps"])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="no gain in N"):
        stop_rule(text)


def test_a_run_without_gains_ends_with_its_result_also_after_a_kill(runs, tiny_model, tmp_path):
    write_all(tmp_path / "plain", tiny_model, **STILL)
    done = runs(tmp_path / "plain", "train", "run.yaml")
    assert done.code == 0, done.err
    assert "by stop_when" in done.out  # and no warning
    assert "by stop_when" not in done.err
    summary = json.loads((tmp_path / "plain" / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert "| steps | 2 |" in (tmp_path / "plain" / "run" / "adapter" / "README.md").read_text()
    write_all(tmp_path / "killed", tiny_model, **STILL)
    die = Die("tunesmith.train.loop:_Loop._evaluate", count=3)
    assert runs(tmp_path / "killed", "train", "run.yaml", die=die).code < 0
    assert runs(tmp_path / "killed", "train", "run.yaml").code == 0
    assert json.loads((tmp_path / "killed" / "run" / "summary.json").read_text())["steps"] == 2
    weights = [(tmp_path / name / "run" / "adapter" / "adapter_model.safetensors") for name in ("plain", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_a_run_ends_below_a_loss_and_is_refused_without_held_out_data(runs, tiny_model, tmp_path):
    write_all(tmp_path, tiny_model, eval_every=1, stop_when="loss below 100")
    assert runs(tmp_path, "train", "run.yaml").code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    write_all(tmp_path / "none", tiny_model, eval=[], held_out=0, stop_when="loss below 100")
    refused = runs(tmp_path / "none", "train", "run.yaml")
    assert refused.code == 1
    assert "stop_when needs held-out data" in refused.err
