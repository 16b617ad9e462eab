"""`doctor` reports what is there and what is wrong, also on a broken installation."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from tunesmith.cli import doctor
from tunesmith.cli.main import app

GPU_MACHINE = {
    "cpu": "a CPU",
    "cores": 4,
    "memory": 8 << 30,
    "available": 4 << 30,
    "has_fast_bf16": False,
    "gpus": [{"name": "H200", "memory": 141 << 30, "free": 100 << 30, "capability": [9, 0]}],
    "driver": "580.1",
}


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def without(monkeypatch, **versions: str | None) -> None:
    """Pretends that packages have other versions, or none."""
    real = metadata.version

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"), real) if name.replace("-", "_") in versions else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor.metadata, "version", version)


def test_the_report_names_versions_and_devices():
    done = run()
    assert done.exit_code == 0, done.output
    for word in (
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "peft",
        "gguf",
        "triton",
        "flash-attn-4",
        "CPU",
        "disk",
    ):
        assert word in done.output
    assert metadata.version("torch") in done.output


def test_the_json_report_is_complete():
    report = json.loads(run("--json").stdout)
    assert report["ok"] is True
    assert {package["name"] for package in report["packages"]} >= {"torch", "pydantic", "peft", "flash-attn-4"}
    assert report["machine"]["cores"] >= 1
    assert report["disks"][0]["free"] > 0


def test_a_missing_or_old_required_package_fails_with_the_command_to_get_it(monkeypatch):
    without(monkeypatch, datasets=None, transformers="4.57.0")
    done = run("--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    problems = {problem["what"]: problem["fix"] for problem in report["problems"]}
    assert problems["datasets is missing"] == "pip install 'datasets>=4'"
    assert problems["transformers 4.57.0 is not <6,>=5"] == "pip install 'transformers<6,>=5'"
    assert "problem: datasets is missing" in run().output


def test_a_missing_optional_package_is_offered_and_fails_nothing(monkeypatch):
    without(monkeypatch, peft=None)
    done = run()
    assert done.exit_code == 0
    assert "pip install 'tunesmith[peft]'" in done.output


def test_things_for_gpus_are_offered_only_where_there_is_one(monkeypatch):
    without(monkeypatch, flash_attn_4=None)
    monkeypatch.setattr(doctor, "_machine", lambda: GPU_MACHINE | {"gpus": []})
    assert "flash-attn-4" not in {item["name"] for item in doctor.examine()["optional"]}
    monkeypatch.setattr(doctor, "_machine", lambda: GPU_MACHINE)
    assert "flash-attn-4" in {item["name"] for item in doctor.examine()["optional"]}


def test_a_gpu_that_torch_cannot_use_is_a_problem_but_no_failure(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_machine", lambda: GPU_MACHINE)
    monkeypatch.setattr(torch.version, "cuda", None)
    done = run()
    assert done.exit_code == 0
    assert "there is a GPU (H200) but torch" in done.output
    assert "is a CPU build" in done.output
    assert "compute capability 9.0, driver 580.1" in done.output
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "cannot use it with driver 580.1" in run().output


def test_a_machine_that_cannot_be_looked_at_is_left_out(monkeypatch):
    monkeypatch.setattr(doctor, "_machine", lambda: None)
    assert run().exit_code == 0


def test_little_disk_space_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 62)
    assert "free for this folder" in run().output


def test_a_source_tree_that_is_not_installed_is_examined_too(monkeypatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", requires)
    without(monkeypatch, datasets=None)
    report = json.loads(run("--json").stdout)
    assert "torch" in {package["name"] for package in report["packages"]}
    assert any("versions wanted are not known" in problem["what"] for problem in report["problems"])
    assert any(problem["fix"] == "pip install 'datasets'" for problem in report["problems"])
