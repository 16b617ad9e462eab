"""The benchmarks of learning and of objectives: what is made of their runs, and the student of distillation."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tunesmith.config.load import from_mapping

ROOT = Path(__file__).parents[2]
ABOUT = {"what": "w", "date": "d", "commit": "c", "device": "D", "versions": {}}


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("learning")


@pytest.fixture
def objectives(monkeypatch):
    """By its file: the tests have a package of the same name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("objectives_benchmark", ROOT / "benchmarks" / "objectives.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in [{"document": ABOUT}, *rows]))
    return file


def test_a_promise_is_met_by_all_seeds_or_not_at_all(learning, tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    names = [task.name for task in learning.TASKS]
    student = next(name for name in names if "as teacher" in name)
    common = {"figure": "loss", "before": 9.0, "steps": 2, "tokens": 9}
    runs = [{"name": learning.ALONE, "seed": seed, "after": 2.0 + seed, **common} for seed in (0, 1)]
    runs += [{"name": student, "seed": seed, "after": after, **common} for seed, after in ((1, 2.9), (0, 1.9))]
    runs += [{"name": student, "seed": 2, "failed": "no"}]
    learning.collect([write(tmp_path / "a", runs)])
    made = {row["what"]: row for row in json.loads((tmp_path / "learning.json").read_text())["numbers"]}
    assert (made[student]["seeds"], made[student]["after"], made[student]["is_met"]) == ([0, 1], [1.9, 2.9], True)
    worse = {"name": student, "seed": 1, "after": 3.1, **common}  # a newer run of the same seed
    learning.collect([tmp_path / "a", write(tmp_path / "b", [worse])])
    made = {row["what"]: row for row in json.loads((tmp_path / "learning.json").read_text())["numbers"]}
    assert not made[student]["is_met"]


def test_the_student_is_the_model_with_half_of_its_layers(learning, tiny_model, tmp_path):
    learning.make_student(tiny_model, tmp_path / "student")
    whole, half = (AutoModelForCausalLM.from_pretrained(one) for one in (tiny_model, tmp_path / "student"))
    assert len(half.model.layers) == len(whole.model.layers) // 2
    whole.model.layers = whole.model.layers[::2]
    tokens = torch.arange(3, 19)[None]
    assert torch.equal(half(tokens).logits, whole(tokens, use_cache=False).logits)


def test_what_was_measured_before_stays_and_new_rows_are_compared(objectives, tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    steps = {"teacher in each step": 0.4, "teacher asked once": 0.25, "no teacher": 0.2}
    taught = [{"name": f"8B into 1B, {name}", "peak_bytes": 1, "median_seconds": s} for name, s in steps.items()]
    objectives.collect([write(tmp_path / "a", taught)])
    peaks = {"sweep of four": 110, "sweep of four, one alone": 100}
    swept = [{"name": f"8B, {name}", "system": "whole", "peak_bytes": size} for name, size in peaks.items()]
    objectives.collect([write(tmp_path / "b", swept)])
    made = {row["name"]: row for row in json.loads((tmp_path / "objectives.json").read_text())["numbers"]}
    assert made["8B into 1B, teacher in each step"]["share_of_teacher"] == 0.5
    assert made["8B into 1B, teacher asked once"]["time_to_live"] == pytest.approx(0.625)
    assert made["8B, sweep of four"]["memory_to_one"] == 1.1


def test_twenty_configurations_are_drawn_over_all_objectives(objectives):
    cases = objectives.draw_new(Path("folder"), tiny=False)
    assert len({case.name for case in cases}) == 20
    assert cases == objectives.draw_new(Path("folder"), tiny=False)
    for case in cases:
        from_mapping({"model": "m", **case.settings})  # or it says what does not go together
    used = {case.settings.get("objective", "sft") for case in cases}
    assert used >= {"kto", "reward", "classify", "classify_tokens", "embed", "distill", "grpo", "sft"}


@pytest.mark.slow
def test_a_run_is_trained_and_judged(tiny_model, tmp_path):
    records = [{"instruction": f"Say {n}.", "input": "", "output": str(n)} for n in range(150)]
    for name in ("lf_alpaca_en_demo.json", "rasbt_instruction.json"):
        (tmp_path / name).write_text(json.dumps(records))
    command = [sys.executable, "benchmarks/learning.py", "--model", str(tiny_model), "--data", str(tmp_path)]
    command += ["--out", str(tmp_path / "out"), "--tiny", "--seeds", "0", "--only", "half the layers"]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    rows = [json.loads(line) for line in (tmp_path / "out" / "learning.jsonl").read_text().splitlines()[1:]]
    assert [row["steps"] for row in rows] == [2, 2]
    assert all(row["after"] < row["before"] for row in rows)
