"""`tunesmith profile`, and profiled steps inside a run."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import write_all


def write_brief(folder: Path, model: Path, **changes) -> Path:
    """With one micro-batch a step: a profile is as long as what it shows."""
    folder = write_all(folder, model, **changes)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"micro_batch": 4}))
    return folder


def test_a_profile_is_shown_and_written_and_leaves_the_run_alone(runs, tiny_model, tmp_path):
    folder = write_brief(tmp_path, tiny_model)
    ended = runs(folder, "profile", "run.yaml", "--plan", "plan.json")
    assert ended.code == 0, ended.err
    assert "profiler_st" not in ended.err
    for word in ("tokens/s", "forward", "optimizer", "memory at the peak", "bound"):
        assert word in ended.out
    assert [path.name for path in (folder / "run").iterdir()] == ["profile"]
    assert {"trace.json.gz", "memory.svg", "report.json"} == {path.name for path in (folder / "run/profile").iterdir()}


def test_json_is_one_document_with_the_figures(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    ended = runs(folder, "profile", "run.yaml", "--json", "--steps", "1", "steps=1")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["analysis"]["coverage"] > 0.9
    assert report["bound_by"] in report["bound"].lower()
    assert sum(report["analysis"]["memory"]["at_peak"].values()) == report["measured_peak"]


def test_steps_inside_a_run_are_profiled_and_change_nothing(runs, tiny_model, tmp_path):
    plain = write_brief(tmp_path / "plain", tiny_model, steps=4)
    watched = write_brief(tmp_path / "watched", tiny_model, steps=4)
    assert runs(plain, "train", "run.yaml", "--plan", "plan.json").code == 0
    ended = runs(watched, "train", "run.yaml", "--plan", "plan.json", "profile_steps=2:3")
    assert ended.code == 0, ended.err
    assert "The profile is in run/profile" in ended.out
    report = json.loads((watched / "run/profile/report.json").read_text())
    assert report["step"] == 3
    adapters = [folder / "run/adapter/adapter_model.safetensors" for folder in (plain, watched)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_run_that_ends_before_the_last_of_them_still_has_its_profile(runs, tiny_model, tmp_path):
    folder = write_brief(tmp_path, tiny_model, steps=3)
    ended = runs(folder, "train", "run.yaml", "--plan", "plan.json", "profile_steps=3:9")
    assert ended.code == 0, ended.err
    assert json.loads((folder / "run/profile/report.json").read_text())["step"] == 3
