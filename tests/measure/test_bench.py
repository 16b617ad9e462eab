"""What `bench` compares is the same work, measured in the same way."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics

import numpy as np
import pytest

from tunesmith.measure import bench, compare, peers
from tunesmith.plan.hardware import named, probe


@pytest.fixture(scope="module")
def ours() -> bench.Measurement:
    workload = bench.WORKLOADS["tiny"]
    plan = bench.plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
    return bench.measure(bench.build(workload, plan), workload, warmup=1, steps=2)


def test_a_measurement_has_speed_and_memory(ours):
    assert ours.tokens_per_second > 0
    assert ours.step_seconds > 0
    assert ours.peak_bytes > 2**20


def test_transformers_with_peft_has_the_same_loss_on_the_same_tokens(ours):
    pytest.importorskip("peft")
    workload = bench.WORKLOADS["tiny"]
    theirs = peers.measure_peer("transformers", workload, device="cpu", checkpointing=False, warmup=1, steps=2)
    again = peers.measure_peer("transformers", workload, device="cpu", checkpointing=True, warmup=1, steps=2)
    assert theirs.loss == pytest.approx(ours.loss, abs=0.05)
    assert again.loss == pytest.approx(theirs.loss, abs=1e-4)


@pytest.mark.parametrize("method", ["qlora", "full"])
def test_other_methods_are_measured_too(ours, method):
    workload = dataclasses.replace(bench.WORKLOADS["tiny"], method=method)
    plan = bench.plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=1, compiled=False)
    found = bench.measure(bench.build(workload, plan), workload, warmup=1, steps=2)
    assert found.loss == pytest.approx(ours.loss, abs=0.05)


def test_what_is_planned_is_what_the_planner_plans_for_the_workload(ours, capsys):
    order = compare.Order("tiny", "tunesmith", "planned", "cpu", 1, 2)
    plan = compare.plan_of(order, probe())
    assert plan.reasons
    assert (plan.sequence_length, plan.sequences_per_step) == (128, 2)
    compare.work(json.dumps(dataclasses.asdict(order)))
    found = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(compare.RESULT))
    assert found["loss"] == pytest.approx(ours.loss, abs=1e-3)


def test_packed_documents_are_the_same_for_all(ours):
    workload = dataclasses.replace(bench.WORKLOADS["tiny"], length=512, is_packed=True)
    (batch,) = bench.batches(workload, 1)
    (row,) = peers._rows(batch, workload, "cpu")
    padded = list(peers._padded(batch, workload, "cpu"))
    tokens = sum(int(part["attention_mask"].sum()) for part in padded)
    assert row["input_ids"].numel() == tokens == batch.tokens
    assert all(part["input_ids"].numel() <= workload.sequences * workload.length for part in padded)
    assert int((row["position_ids"] == 0).sum()) == sum(len(part["input_ids"]) for part in padded)


def test_packed_documents_are_as_long_as_those_of_chats():
    workload = bench.WORKLOADS["lora-8b-packed"]
    random = np.random.Generator(np.random.PCG64(0))
    drawn = [bench.chat_lengths(random, workload) for _ in range(20)]
    lengths = [length for one in drawn for length in one]
    assert 250 < statistics.median(lengths) < 450
    assert max(lengths) <= workload.length
    room = 20 * workload.sequences * workload.length
    assert 0.97 * room < sum(lengths) <= room


def test_without_a_gpu_the_tiny_workload_is_measured_against_transformers(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(peers, "find_spec", lambda name: name in ("transformers", "peft", "unsloth") or None)
    assert compare.default_workloads() == ["tiny"]
    found = compare.orders("tiny", with_peers=True, is_quick=True)
    assert [(order.system, order.variant) for order in found] == [
        ("tunesmith", "planned"),
        ("tunesmith", "by hand: fp32"),
        ("transformers", "fp32"),
    ]
    assert [order.system for order in compare.orders("tiny", with_peers=False, is_quick=True)] == 2 * ["tunesmith"]


def test_on_a_gpu_variants_follow_what_it_can_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(peers, "find_spec", lambda _: True)
    found = {(order.system, order.variant) for order in compare.orders("full-7b", with_peers=True, is_quick=False)}
    assert {("tunesmith", "by hand: fp8 checkpoint"), ("unsloth", "bf16"), ("trl", "bf16")} <= found
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
    older = {order.variant for order in compare.orders("full-7b", with_peers=False, is_quick=False)}
    assert older == {"planned", "by hand: bf16", "by hand: bf16 checkpoint"}


def test_what_fits_in_one_way_only_is_measured_in_that_way(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(peers, "find_spec", lambda _: True)
    for name in ("lora-8b-long", "qlora-70b"):
        found = compare.orders(name, with_peers=True, is_quick=False)
        assert [order.variant for order in found] == ["planned", "by hand: fp8 checkpoint"]
        assert name not in compare.default_workloads()


@pytest.mark.parametrize("name", ["lora-8b", "qlora-8b", "lora-8b-long"])
def test_what_a_workload_saves_does_not_change_its_loss(ours, name, monkeypatch, capsys):
    saving = {**bench.WORKLOADS[name].saving}
    if "mlp_slice" in saving:
        saving["mlp_slice"] = 100
    monkeypatch.setitem(bench.WORKLOADS, "tiny", dataclasses.replace(bench.WORKLOADS["tiny"], saving=saving))
    compare.work(json.dumps(dataclasses.asdict(compare.Order("tiny", "tunesmith", "fp32 checkpoint", "cpu", 1, 2))))
    found = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(compare.RESULT))
    assert found["loss"] == pytest.approx(ours.loss, abs=1e-4)


def test_the_ratio_is_to_the_fastest_peer_of_the_same_workload():
    rows = [
        {"workload": "a", "system": "tunesmith", "tokens_per_second": 300.0},
        {"workload": "a", "system": "slow", "tokens_per_second": 100.0},
        {"workload": "a", "system": "fast", "tokens_per_second": 200.0},
        {"workload": "a", "system": "broken", "failed": "out of memory"},
        {"workload": "b", "system": "tunesmith", "tokens_per_second": 10.0},
    ]
    assert [row.get("to_best_peer") for row in compare.compare(rows)] == [1.5, 0.5, 1.0, None, None]


def test_a_system_that_fails_is_a_row_that_says_so(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'RuntimeError: no device nonsense' >&2\necho 'and more' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(compare.sys, "executable", str(script))
    row = compare.carry_out(compare.Order("tiny", "transformers", "fp32", "nonsense", 1, 1))
    assert row == {
        "workload": "tiny",
        "system": "transformers",
        "variant": "fp32",
        "failed": "RuntimeError: no device nonsense",
    }


def test_what_does_not_fit_is_a_sentence_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(compare.subprocess, "run", None)  # no process is started
    order = compare.Order("qlora-70b", "tunesmith", "bf16 checkpoint", "cuda", 1, 3)
    small = named("RTX 4090")
    row = compare.carry_out(order, small)
    assert re.fullmatch(r"needs about \d+\.\d GiB, and 2\d\.\d GiB are free on .*4090.*", row["failed"])
    on_cpu = compare.Order("full-7b", "tunesmith", "fp32", "cpu", 1, 3)
    crowded = probe().model_copy(update={"available": 8 << 30})
    assert "and 8.0 GiB are free on this machine" in compare.carry_out(on_cpu, crowded)["failed"]


def test_what_fitted_where_it_was_measured_is_not_refused_there():
    """Peaks of docs/benchmarks.md, on an H200."""
    for name in bench.WORKLOADS:
        for variant in ("planned", "bf16", "fp8 checkpoint"):
            if not (bench.WORKLOADS[name].is_low_memory and variant == "bf16"):
                order = compare.Order(name, "tunesmith", variant, "cuda", 1, 3)
                assert compare.shortage(order, named("H200")) is None, (name, variant)
    assert compare.shortage(compare.Order("tiny", "tunesmith", "fp32", "cpu", 1, 3), probe()) is None
