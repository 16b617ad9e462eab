"""The GPU benchmark's mechanism, at a tiny shape without a GPU: cases in processes, one file of results, one page."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tunesmith.kernels import quantize
from tunesmith.measure import bench, peers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def row(**changes) -> dict:
    made = {
        "workload": "lora-8b",
        "system": "tunesmith",
        "goal": "throughput",
        "matmul_dtype": "fp8",
        "step_seconds": 0.5,
    }
    return made | {"tokens_per_second": 200.0, "peak_bytes": 2**30} | changes


def write(file: Path, commit: str, rows: list[dict]) -> Path:
    head = {"document": {"what": "w", "date": "d", "commit": commit, "device": "D", "versions": {}}}
    file.write_text("".join(json.dumps(one) + "\n" for one in [head, *rows]))
    return file


@pytest.mark.slow
def test_cases_are_measured_on_two_layers_and_then_whole(gpu, tmp_path):
    cases = [
        gpu.Case("tiny", system, "throughput", 1, first_gib=1, warmup=1, steps=2)
        for system in ("tunesmith", "transformers")
    ]
    gpu.measure(cases, tmp_path, workers=2, deadline=300)
    head, *rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert head["document"]["commit"]
    ours, theirs = sorted(rows, key=lambda one: one["system"] != "tunesmith")
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-3)
    assert ours["tokens_per_second"] > 0
    assert ours["rehearsal_seconds"] > 0
    assert ours["notes"] == theirs["notes"] == []


def test_the_large_cases_are_measured_when_they_are_named(gpu):
    usual = gpu.choose([])
    assert len(usual) == 16
    assert [case.gib for case in usual] == sorted(case.gib for case in usual)
    assert [case.workload for case in gpu.choose(["long", "70b"])] == ["qlora-70b", "lora-8b-long"]
    assert {case.workload for case in gpu.choose(["lora-8b,"])} == {"lora-8b", "qlora-8b"}
    assert not any(case.is_large for case in gpu.choose(["low memory", "lora-8b"]))


def test_the_newest_row_of_a_case_counts_and_a_failure_only_where_nothing_else_is(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    old = write(tmp_path / "a", "old", [row(tokens_per_second=100.0), row(goal="low memory"), row(workload="full-7b")])
    peer = row(system="unsloth", matmul_dtype="bf16", tokens_per_second=160.0)
    failures = [row(goal="low memory", failed="out of time"), row(workload="qlora-8b", failed="out of memory")]
    new = write(tmp_path / "b", "new", [row(), peer, *failures])
    gpu.collect([old])
    found = json.loads(gpu.collect([new]).read_text())
    assert found["numbers"][0]["earlier"] == [100]
    kept = [(one["workload"], one["system"], one["goal"], one["commit"]) for one in found["numbers"]]
    assert kept == [
        ("lora-8b", "tunesmith", "throughput", "new"),
        ("lora-8b", "tunesmith", "low memory", "old"),
        ("lora-8b", "unsloth", "throughput", "new"),
        ("qlora-8b", "tunesmith", "throughput", "new"),
        ("full-7b", "tunesmith", "throughput", "old"),
    ]
    assert found["commit"] == "new"
    assert [one.get("to_best_peer") for one in found["numbers"]] == [1.25, None, None, None, None]
    said = capsys.readouterr().err
    assert "lora-8b, tunesmith, throughput, fp8: 100 tokens/s" in said
    assert "lora-8b, tunesmith, low memory, fp8: out of time" in said


def test_kernels_are_sorted_by_what_they_are_for(gpu):
    profile = importlib.import_module("gpu_profile")
    names = {
        "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT": "matmul_dtype",
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT": "head",
        "nvjet_sm90_tst_32x128_64x10_1x2_h_bz_NNN": "low-rank sums",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention",
        "_rows": "quantizing",
        "_row": "head",
        "triton_poi_fused_add_view_5": profile.REST,
    }
    made = [{"name": name, "calls": 1, "ms": 2.0**at} for at, name in enumerate(names)]
    found = profile.kinds({"kernel_ms": 200.0, "kernels": made}, matmul_dtype="fp8")
    expected: dict[str, float] = {}
    for at, kind in enumerate(names.values()):
        expected[kind] = expected.get(kind, 0.0) + 2.0**at
    expected[profile.REST] += 200.0 - 127.0
    assert found == expected
    launched = re.findall(r"(\w+)\[", Path(quantize.__file__).read_text())
    ours = [name for name in launched if name.startswith("_") and callable(getattr(quantize, name, None))]
    assert "_turn" in ours
    assert {profile._kind(name, "fp8") for name in ours} == {"quantizing"}
    assert profile._kind("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "bf16") == "matmul_dtype"


def test_the_page_shows_speeds_ratios_and_where_the_time_goes(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generate = importlib.import_module("generate")
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    kernels = [
        {"name": "_rows", "calls": 1, "ms": 100.0},
        *[{"name": f"k{at}", "calls": 1, "ms": 1} for at in range(50)],
    ]
    recorded = row(profile={"kernel_ms": 400.0, "kernels": kernels})
    peer = row(system="unsloth", matmul_dtype="bf16", tokens_per_second=160.0)
    gpu.collect([write(tmp_path / "a", "c", [recorded, peer, row(goal="low memory", failed="out of time")])])
    write(tmp_path / "gpu_speed.json", "c", [])
    page = generate.benchmarks_page()
    assert "| lora-8b | throughput | tunesmith | fp8 | 200 | 1.25 | 1.0 | 80.0% |" in page
    assert "| lora-8b | throughput | unsloth | bf16 | 160 |  | 1.0 |  |" in page
    assert "| lora-8b | low memory | tunesmith | fp8 | out of time |  |  |  |" in page
    assert "| quantizing | 100.0 | 25.0% |" in page
    assert "| none runs | 100.0 | |" in page
    assert len(json.loads((tmp_path / "gpu.json").read_text())["numbers"][0]["profile"]["kernels"]) == 25


def test_a_model_written_for_others_has_alike_layers_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    workload = bench.WORKLOADS["tiny"]
    path = peers.saved(workload, tmp_path, "cpu")
    assert peers.saved(workload, tmp_path, "cpu") == path
    model = AutoModelForCausalLM.from_pretrained(path)
    first, second = model.model.layers
    assert torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)
    assert model.config.num_hidden_layers == 2
    assert first.mlp.up_proj.weight.std() > 0


@pytest.mark.slow
def test_each_strategy_is_held_against_the_plain_path_with_the_same_losses(tmp_path, monkeypatch):
    environment = os.environ | {"RESULTS": str(tmp_path)}
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_strategies.py"),
        "--layers",
        "2",
        "--only",
        "qlora",
        "host",
    ]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    content = json.loads((tmp_path / "gpu_strategies.json").read_text())
    rows = {(one["method"], one["way"]): one for one in content["numbers"]}
    assert list(rows) == [(*pair,) for pair in (("qlora", "plain"), ("qlora", "zero3"), *HOST)]
    assert rows["qlora", "zero3"]["loss"] == pytest.approx(rows["qlora", "plain"]["loss"], abs=1e-4)
    assert rows[HOST[1]]["loss"] == pytest.approx(rows[HOST[0]]["loss"], abs=1e-4)
    assert rows[HOST[1]]["moved_bytes"] > 8 * 64 * 512  # two fp32 states of the embedding alone
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generate = importlib.import_module("generate")
    table = generate._strategies(content | {"numbers": [*content["numbers"], {**FAILED, "failed": "a | b"}]})
    assert len(table) == 4 + 5
    assert table[-1] == "| full | zero3 | 16,384 |  |  |  |  |  | a \\| b |"
    assert "GB each way" in table[-2]


HOST = [("full", "8B, states: plain"), ("full", "8B, states: host")]
FAILED = {"method": "full", "way": "zero3"}


def test_what_a_strategy_took_before_is_kept_beside_what_it_takes_now(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    strategies = importlib.import_module("gpu_strategies")
    about = {"what": "w", "date": "d", "device": "D", "versions": {}}

    def row(way: str, share: float, group: str = "full-32k", **more) -> dict:
        return {"group": group, "method": "full", "way": way, "share_of_plain": share, "tokens": 8, **more}

    before, now = tmp_path / "before", tmp_path / "now"
    kept = [row("plain", 1.0), row("ddp", 0.9, earlier=[0.8]), row("zero3", 0.7, tokens=4)]
    new = [row("plain", 1.0), row("ddp", 0.95), row("zero3", 0.75), row("plain", 1.0, "lora"), {"failed": "no"}]
    for folder, commit, rows in ((before, "a", kept), (now, "b", new)):
        folder.mkdir()
        (folder / "gpu_strategies.json").write_text(json.dumps({**about, "commit": commit, "numbers": rows}))
    monkeypatch.setattr(strategies, "FOLDER", before)
    monkeypatch.setenv("RESULTS", str(before))
    written = json.loads(strategies.collect(now / "gpu_strategies.json").read_text())
    assert written["commit"] == "b"
    found = [(one["group"], one["way"], one["share_of_plain"], one.get("earlier")) for one in written["numbers"]]
    assert found == [
        ("full-32k", "plain", 1.0, None),
        ("full-32k", "ddp", 0.95, [0.8, 0.9]),
        ("full-32k", "zero3", 0.75, None),  # with another number of tokens it was something else
        ("lora", "plain", 1.0, None),
    ]
