"""From a run folder to what its page shows."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_runs import GIB, line, record_run, step_event
from tunesmith.checkpoint.lock import RunLock
from tunesmith.errors import UserError
from tunesmith.evaluate import verdicts
from tunesmith.train import events
from tunesmith.ui.log import digest
from tunesmith.ui.read import curves, differences, flat, is_held, open_log, page, read_settled, state_of
from tunesmith.ui.thin import smoothed, thinned


def page_of(folder, **options):
    made = page(folder, open_log(folder), **options)
    json.dumps(made, allow_nan=False)
    return made


def state(folder):
    return state_of(folder, digest(folder), read_settled(folder))[0]


@pytest.mark.parametrize(("ends", "expected"), [("finished", "finished"), ("stopped", "stopped"), (None, "failed")])
def test_the_state_of_a_run_that_nobody_writes(tmp_path, ends, expected):
    assert state(record_run(tmp_path / "run", steps=5, ends=ends)) == expected


def test_a_run_is_running_while_its_lock_is_held_and_looking_does_not_take_it(tmp_path):
    folder = record_run(tmp_path / "run", steps=5, total=50, ends=None)
    with RunLock(folder):
        assert is_held(folder)
        assert state(folder) == "running"
        with (folder / "events.jsonl").open("a") as stream:
            stream.write('{"event": "stopping", "reason": "stopped by Ctrl-C", "time": 1.0}\n')
        assert state(folder) == "stopping"
    assert state(folder) == "failed"
    with RunLock(folder, wait_s=0.0):
        pass


def test_a_page_has_what_was_predicted_measured_decided_and_said(tmp_path):
    made = page_of(record_run(tmp_path / "run", steps=80, warnings=("look",), objective="dpo"))
    assert made["objective"] == "dpo"
    assert made["data"] == ["support.jsonl", "alpaca.jsonl"]
    assert made["clip"] == 1.0
    assert made["predicted"]["memory"] == made["measured"]["predicted_memory"]
    assert made["predicted"]["memory_limit"] == 24 * GIB
    assert made["predicted"]["tokens_per_second"] == pytest.approx(8192 / 0.45)
    assert made["profile"] is None
    assert made["predicted"]["arithmetic_tokens_per_second"] == pytest.approx(8192 / 0.43)
    assert made["measured"]["memory"]["weights"][0] == 16 * GIB
    assert made["plan"][0]["choice"] == "bf16"
    assert made["warnings"][0]["message"] == "look"
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "note", "time": 9.0, "message": "ended by stop_when"}) + "\n")
    assert page_of(tmp_path / "run")["warnings"][-1]["message"] == "ended by stop_when"
    assert [one["is_there"] for one in made["checkpoints"]] == [False] * 8 + [True]
    assert made["settings"]["lora.rank"]
    found = made["curves"]
    assert found["step"] == list(range(81))
    assert found["loss"][0] is None
    assert set(found["held_out"]) == {"all", "support", "alpaca"}
    assert [found["step"][place] for place, _ in found["held_out"]["all"]] == list(range(0, 81, 10))
    assert set(found["figures"]) == {"accuracy", "margin"}
    assert found["tokens"][-1] == 80 * 8192


def test_alerts_and_memory_by_category_are_on_the_page_and_forgotten_with_their_steps(tmp_path):
    folder = record_run(tmp_path / "run", steps=40, ends=None)
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(line(events.Alert(30, "loss spike", "<b>9.0</b>", "look"), 1.0))
        stream.write(line(events.Alert(40, "divergence", "all", "stop"), 1.0))
        stream.write(line(events.Resumed(35), 1.0))
        stream.write(line(dataclasses.replace(step_event(36, 40, random.Random(0)), memory_by={"gradients": 7}), 1.0))
    made = page_of(folder)
    assert [(one["step"], one["name"], one["evidence"]) for one in made["alerts"]] == [(30, "loss spike", "<b>9.0</b>")]
    ((place, size),) = made["curves"]["memory_by"]["gradients"]
    assert (made["curves"]["step"][place], size) == (36, 7)


def test_what_routers_do_is_on_the_page(tmp_path):
    folder = record_run(tmp_path / "run", steps=40)
    assert page_of(folder)["routers"] is None
    with (folder / "events.jsonl").open("a") as stream:
        for step, busiest in ((1, 1.2), (16, 3.0)):
            found = events.Routers(step, [0, 2, 3], [1.0, busiest, 1.1], [1.0, 0.5, 0.9], [0, 2, 0], [[0.25] * 4] * 3)
            stream.write(line(found, 1.0))
        stream.write('{"event": "routers", "step": 20, "layers": 3, "busiest": "x"}\n')
        stream.write(line(found, 1.0))
    made = page_of(folder)
    row = {"layers": 2, "busiest": 3, "entropy": 0.5, "idle": 2, "experts": 4}
    assert (made["routers"]["step"], made["routers"]["rows"][1]) == (16, row)
    curve = made["curves"]["routers"]["least even layer"]
    assert [(made["curves"]["step"][place], value) for place, value in curve] == [(1, 1.2), (16, 3)]


def test_the_last_verdict_against_each_model_is_on_the_page(tmp_path):
    folder = record_run(tmp_path / "run", steps=5)
    row = {"task": "mmlu", "measure": "accuracy", "value": 0.6, "against": 0.5, "difference": 0.1, "low": None}
    for value in (0.6, 0.7):
        found = {"model": "run", "against": "base", "results": [row | {"value": value, "verdict": "better"}]}
        verdicts.write(folder / "evaluations", found | {"summary": "<b>better</b>"})
    with (folder / "evaluations" / verdicts.FILE).open("a") as stream:
        stream.write('{"results": [3]}\n{"results"')
    odd, told = page_of(folder)["verdicts"]
    assert odd["rows"] == []
    assert (told["against"], told["summary"], told["rows"][0]["value"]) == ("base", "<b>better</b>", 0.7)


def test_ten_thousand_steps_are_drawn_by_fewer_points_and_no_spike_is_lost(tmp_path):
    folder = record_run(tmp_path / "run", steps=10_000)
    log = open_log(folder)
    found = curves(log.records)
    assert found["is_thinned"]
    assert len(found["step"]) < 4000
    whole = {one["step"]: one["loss"] for one in log.records if one["event"] == "step"}
    spike = max(whole, key=lambda step: whole[step])
    assert spike in found["step"]
    part = curves(log.records, steps=(spike - 100, spike + 100))
    assert set(range(spike - 100, spike + 101)) <= set(part["step"])
    assert len(part["step"]) <= 201 + 9
    assert not part["is_thinned"]
    assert len(part["held_out"]["all"]) == 9


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400), st.integers(1, 40))
def test_thinning_keeps_the_ends_and_the_extremes_in_order(values, pixels):
    kept = thinned([values], pixels=pixels)
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert len(kept) <= 2 * pixels + 2
    chosen = np.array(values)[kept]
    if np.isfinite(values).any():
        assert np.nanmin(chosen) == np.nanmin(values)
        assert np.nanmax(chosen) == np.nanmax(values)


def test_smoothing_is_unbiased_and_skips_what_is_no_number():
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    found = smoothed([float("nan"), 1.0, float("nan"), 3.0])
    assert np.isnan(found[0])
    assert found[1] == found[2] == pytest.approx(1.0)
    assert 1.0 < found[3] < 3.0


@pytest.mark.parametrize("name", ["run.json", "plan.json", "summary.json", "events.jsonl"])
@pytest.mark.parametrize(
    "content", ["", "[]", "{", "null", '{"settings": 3, "reasons": [1], "memory": [], "time": "x"}']
)
def test_a_damaged_folder_is_shown_as_far_as_it_goes(tmp_path, name, content):
    folder = record_run(tmp_path / "run", steps=5)
    (folder / name).write_text(content)
    made = page_of(folder)
    assert name == "events.jsonl" or made["step"] == 5


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        open_log(tmp_path)


def test_settings_that_differ_are_named_and_outputs_are_not():
    one = flat({"method": "lora", "lora": {"rank": 8}, "data": [{"path": "a"}], "output": "x", "steps": None})
    two = flat({"method": "lora", "lora": {"rank": 16}, "data": [{"path": "a"}, {"path": "b"}], "output": "y"})
    assert one == {"method": "lora", "lora.rank": 8, "data.1.path": "a", "output": "x"}
    assert differences({"1": one, "2": two}) == [
        {"name": "data.2.path", "values": {"1": None, "2": "b"}},
        {"name": "lora.rank", "values": {"1": 8, "2": 16}},
    ]


def test_a_profile_is_shown_as_far_as_it_can_be_read(tmp_path):
    folder = record_run(tmp_path / "run", steps=3)
    path = folder / "profile" / "report.json"
    path.parent.mkdir()
    kernel = {"name": "gemm", "calls": 3, "seconds": 0.2, "share": 0.4}
    analysis = {"step_seconds": 0.5, "host_seconds": {"forward": 0.2}, "device_seconds": {}, "kernels": [kernel, 3]}
    path.write_text(
        json.dumps({"step": 2, "device": "cpu", "bound_by": "Compute.", "share_of_peak": 0.5, "analysis": analysis})
    )
    found = page(folder, open_log(folder))["profile"]
    assert (found["step"], found["share_of_peak"], found["regions"]) == (2, 0.5, {"forward": 0.2})
    assert found["kernels"] == [kernel]
    for damaged in ("[1]", "{", '{"analysis": [], "step": "x"}'):
        path.write_text(damaged)
        json.dumps(page(folder, open_log(folder)), allow_nan=False)
