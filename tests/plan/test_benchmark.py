"""The mechanism that holds predictions against measurements: a seeded list, a real step, a table made from the file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tunesmith.plan import memory
from tunesmith.plan.hardware import named, probe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("planner")


def test_the_list_is_seeded_varied_and_near_the_limit_where_asked(planner):
    hardware = named("H200")
    shapes = ["0.1B", "1.2B", "8B"]
    first = planner.configurations(hardware, "cuda", shapes, count=40, near=12, seed=3, most=65536)
    assert first == planner.configurations(hardware, "cuda", shapes, count=40, near=12, seed=3, most=65536)
    assert first != planner.configurations(hardware, "cuda", shapes, count=40, near=12, seed=4, most=65536)
    assert len(set(first)) == 40
    assert {one.method for one in first} >= {"full", "lora"}
    assert {one.is_packed for one in first} == {True, False}
    near = [
        memory.peak(memory.timeline(*planner.settle(one, hardware, "cuda"))).memory.total / hardware.gpus[0].free
        for one in first
    ]
    assert sum(0.85 <= share <= 1.1 for share in near) == 12


def test_a_configuration_is_measured_through_the_trainers_step(planner):
    one = planner.Configuration("tiny", "lora", "sgd", 64, 2, False, "plain", "plain", 0.5)
    found = planner.measure(one, "cpu")
    assert found["tokens_per_second"] > 0
    assert found["step_seconds"] > 0


def test_the_page_is_made_from_the_recorded_runs(planner, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generate = importlib.import_module("generate")
    hardware = probe()
    one = planner.Configuration("tiny", "lora", "adamw", 64, 1, True, "plain", "plain", 0.0)
    task, choice = planner.settle(one, hardware, "cpu")
    size = memory.peak(memory.timeline(task, choice)).memory
    predicted = {"tokens_per_second": 110.0, "allocated_bytes": size.allocated, "total_bytes": size.total}
    measured = {"tokens_per_second": 100.0, "allocated_bytes": size.allocated}
    rows = [
        {"name": one.name, "predicted": predicted, "measured": measured},
        {"name": "too large", "predicted": predicted | {"total_bytes": 10**15}, "failed": "out of memory"},
        {"name": "too sure", "predicted": predicted, "failed": "out of memory"},
    ]
    numbers = {"limit_bytes": 10**12, "margin": {"known": 0.04}, "rows": rows}
    file = tmp_path / "planner.json"
    file.write_text(json.dumps({"device": "D", "date": "d", "commit": "c", "numbers": numbers}))
    page = "\n".join(generate._measured(file))
    assert "tokens a second: off by 10.0% in the median" in page
    assert "said to fit and out of memory: 1; said not to fit and did: 0" in page
    assert f"| {one.name} |" in page


def test_the_planners_page_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generate = importlib.import_module("generate")
    assert (ROOT / "docs" / "planner.md").read_text(encoding="utf-8") == generate.planner_page()
