"""Whole runs whose adapters are merged into the base by and by: killed ones go on to the same bytes, and what comes
out is a model that everything after training takes for one."""

from __future__ import annotations

import json
import signal

import pytest

from tiny import TRAIN, Die, assert_same, write_all
from tunesmith.export.export import storage_note
from tunesmith.run.certificate import certify

STEP = "tunesmith.train.step:TrainStep._forward_backward"


@pytest.mark.parametrize("method", ["loqt", pytest.param("relora", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_bytes_and_gives_a_model(method, runs, tiny_model, tmp_path):
    settings = {"method": method, "lora": {"rank": 4}, "steps": 8, "save_every": 3, "learning_rate": 5e-3}
    whole, killed = (write_all(tmp_path / name, tiny_model, **settings) for name in ("whole", "killed"))
    assert runs(killed, *TRAIN, die=Die(STEP, 26)).code == -signal.SIGKILL
    asked = runs(killed, "eval", "run")
    assert (asked.code, asked.err.count("\n")) == (1, 1)
    assert "gives its model at the end" in asked.err
    ended = runs(killed, *TRAIN)
    assert ended.code == 0, ended.err
    assert "Continuing after step" in ended.out
    assert runs(whole, *TRAIN).code == 0
    assert_same(killed / "run", whole / "run")
    assert not (whole / "run" / "adapter").exists()
    asked = runs(whole, "eval", "run", "--json")
    assert asked.code == 0, asked.err
    after = json.loads((whole / "run" / "summary.json").read_text())["held_out_after"]
    assert json.loads(asked.out)["results"][0]["loss"] == pytest.approx(after, rel=1e-4)
    refused = runs(whole, "merge", "run", "--to", "merged")
    assert (refused.code, "whose result is a model" in refused.err) == (1, True)
    assert storage_note(whole / "run") == []  # also where the base was held in 4 bits
    checks = certify(whole / "run")
    assert "failed" not in json.dumps(checks), checks
