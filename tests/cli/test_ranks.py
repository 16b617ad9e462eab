"""`--ranks` beside `train`: what several ranks find is what one finds."""

from __future__ import annotations

import json

import pytest

from tiny import write_all


def test_a_plan_for_so_many_ranks_of_this_machine_is_shown(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model, batch_tokens=512)
    ended = runs(folder, "plan", "run.yaml", "--ranks", "2", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["plan"]["mesh"]["shard"] * json.loads(ended.out)["plan"]["mesh"]["replicate"] == 2
    ended = runs(folder, "plan", "run.yaml", "--ranks", "2", "--hardware", "H200")
    assert "leave one of the two out" in ended.err


def test_two_ranks_evaluate_to_the_losses_of_one(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model, steps=2)
    assert runs(folder, "train", "run.yaml").code == 0
    found = [
        json.loads(runs(folder, "eval", "run", "--data", "train.jsonl", "--json", *options).out)["results"]
        for options in ([], ["--ranks", "2"])
    ]
    assert found[0][0]["target_tokens"] == found[1][0]["target_tokens"]
    assert found[0][0]["loss"] == pytest.approx(found[1][0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_profile_of_two_ranks_is_that_of_the_first(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    ended = runs(folder, "profile", "run.yaml", "--ranks", "2", "--json", "--steps", "1")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["analysis"]["coverage"] > 0.9
